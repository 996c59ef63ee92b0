"""Padding with the bounds that a test sets."""

from lorikeet.shard.batch.padding import Bounds, Padding


class Always(Padding):
    """The same bounds for all steps."""

    def __init__(self, bounds: Bounds, spare_page: int = 0) -> None:
        super().__init__(bounds.num_rows, bounds.max_kv_len, spare_page)
        self._bounds_of_all = bounds

    def fit(
        self, num_rows: int, num_logits: int, num_drafts: int, has_adapters: bool, has_sums: bool = False
    ) -> Bounds | None:
        return self._bounds_of_all
