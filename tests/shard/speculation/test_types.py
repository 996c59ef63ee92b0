"""Values of the wire."""

from enum import IntEnum

import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import Verification
from lorikeet.shard.requests.request import FinishReason, Source
from lorikeet.shard.scheduler.adapter_slots import Residency


def test_the_earlier_spelling_of_shared_noise_is_accepted() -> None:
    assert Verification("coupled") is Verification("shared-noise") is Verification.SHARED_NOISE
    with pytest.raises(ValueError, match="uncoupled"):
        Verification("uncoupled")


@pytest.mark.parametrize(
    ("ours", "prefix", "wire"),
    [
        (Source, "SOURCE_", dict(pb.Source.items())),
        (FinishReason, "FINISH_", dict(pb.FinishReason.items())),
        (Residency, "", dict(pb.AdapterState.Residency.items())),
    ],
)
def test_every_value_of_the_wire_has_a_name(ours: type[IntEnum], prefix: str, wire: dict[str, int]) -> None:
    assert {prefix + each.name: each.value for each in ours} == wire
