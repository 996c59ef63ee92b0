"""The report equals the counts of a slow run of the chain, token by token, without any of the report's code."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.adapters.formats.heads import MedusaHeads, MedusaShape
from lorikeet.adapters.medusa import training
from lorikeet.adapters.medusa.target import Target
from lorikeet.adapters.medusa.texts import Text
from lorikeet.adapters.medusa.training import replay
from tests.adapters.medusa import small


def live(target: Target, heads: MedusaHeads, text: Text) -> tuple[int, int, list[int]]:
    """Decode with a chain, by whole forward passes: tokens and steps after the first token, and the ids."""
    model = target.model
    known = list(text.prompt_ids)
    length = len(text.output_ids)

    def forward(ids: list[int]) -> tuple[list[int], torch.Tensor]:
        seen: list[torch.Tensor] = []
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        hook.remove()
        return logits.argmax(-1).tolist(), seen[0][0]

    with torch.inference_mode():
        best, rows = forward(known)
        known.append(best[-1])
        row, steps = rows[-1], 0
        while len(known) < len(text.prompt_ids) + length:
            drafts = heads.propose(row[None], target.logits)[0].tolist()
            best, rows = forward(known + drafts)
            place = len(known) - 1
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == best[place + accepted]:
                accepted += 1
            known += best[place : place + accepted + 1]
            row, steps = rows[place + accepted], steps + 1
    output = known[len(text.prompt_ids) :][:length]
    return length - 1, steps, output


def test_tokens_per_step_is_what_a_live_chain_takes(tmp_path: Path) -> None:
    target = small.target(small.base(tmp_path / "base"))
    texts = small.texts(target, num_tokens=20)
    heads = MedusaHeads.of(small.heads(MedusaShape(3, 1, target.hidden_size), scale=0.02))
    counted = [live(target, heads, text) for text in texts]
    assert [tuple(output) for _, _, output in counted] == [text.output_ids for text in texts]
    actual = training.measure(target, heads, texts)
    tokens, steps = sum(t for t, _, _ in counted), sum(s for _, s, _ in counted)
    assert actual.tokens_per_step == tokens / steps
    assert actual.num_texts == len(texts)
    assert actual.num_tokens == 20 * len(texts)
    assert actual.greedy_agreement == 1


def test_top1_is_each_heads_share_of_right_positions(tmp_path: Path) -> None:
    target = small.target(small.base(tmp_path / "base"))
    texts = small.texts(target, num_tokens=15)
    heads = MedusaHeads.of(small.heads(MedusaShape(2, 1, target.hidden_size), scale=0.02))
    right, places = [0, 0], [0, 0]
    for text in texts:
        whole = [*text.prompt_ids, *text.output_ids]
        (rows,) = target.rows([whole])
        for place in range(len(text.prompt_ids) - 1, len(whole)):
            for head, proposed in enumerate(heads.propose(rows[place][None], target.logits)[0].tolist()):
                if place + 2 + head < len(whole):
                    places[head] += 1
                    right[head] += proposed == whole[place + 2 + head]
    assert training.measure(target, heads, texts).top1 == tuple(r / p for r, p in zip(right, places, strict=True))


def test_text_of_another_model_lowers_the_greedy_agreement(tmp_path: Path) -> None:
    target = small.target(small.base(tmp_path / "base"))
    text = small.texts(target, num_tokens=10)[0]
    changed = Text(text.prompt_ids, (*text.output_ids[:9], (text.output_ids[9] + 1) % 300))
    heads = MedusaHeads(MedusaShape(1, 1, target.hidden_size))
    assert training.measure(target, heads, [changed]).greedy_agreement == 0.9


def test_replay_by_hand() -> None:
    text = [5, 6, 7, 8, 9]
    assert replay(text, [[6, 7, 8], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]).steps == 1, (
        "three right, one the target's"
    )
    assert replay(text, [[6, 0, 8], [0] * 3, [8, 9, 1], [0] * 3, [0] * 3]).steps == 2
    assert replay(text, [[0, 7, 8]] * 5).steps == 4, "only a beginning counts"
    assert replay([5], [[6, 7]]).steps == 0
    assert replay(text, [[]] * 5).steps == 4


@given(st.data(), st.integers(1, 4), st.integers(2, 30))
def test_replay_counts_every_token_once_and_stays_within_bounds(data: st.DataObject, num_heads: int, num: int) -> None:
    output = data.draw(st.lists(st.integers(0, 1), min_size=num, max_size=num))
    rows = st.lists(st.integers(0, 1), min_size=num_heads, max_size=num_heads)
    proposals = data.draw(st.lists(rows, min_size=num, max_size=num))
    actual = replay(output, proposals)
    assert actual.tokens == num - 1
    assert actual.steps <= actual.tokens <= actual.steps * (num_heads + 1)
    positions = [0]
    while positions[-1] < num - 1:  # the same by looking for the first wrong token
        at = positions[-1]
        ahead = list(zip(proposals[at], output[at + 1 :], strict=False))
        right = next((i for i, (a, b) in enumerate(ahead) if a != b), len(ahead))
        positions.append(min(at + right + 1, num - 1))
    assert actual.steps == len(positions) - 1
