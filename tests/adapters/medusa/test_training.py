"""Training minimizes the loss of the recipe, uses each row once per epoch, and is a function of recipe and rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from lorikeet.adapters.formats.heads import MedusaHeads
from lorikeet.adapters.medusa import texts as texts_module
from lorikeet.adapters.medusa import training
from lorikeet.adapters.medusa.target import Target
from lorikeet.adapters.medusa.texts import NOTHING, HiddenFiles, Text
from lorikeet.adapters.medusa.training import HeadsOptimizer, HeadsRecipe, HeadsTrainer
from tests.adapters.medusa import small

RECIPE = HeadsRecipe(num_heads=2, epochs=3, rows_per_step=16, lr=0.01, bf16=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small.target(small.base(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def texts(target: Target) -> list[Text]:
    return small.texts(target, 13) + small.texts(target, 9)


def rows_of(target: Target, texts: list[Text], folder: Path, seed: int = 0) -> HiddenFiles:
    files = HiddenFiles(folder, texts, target.hidden_size, seed)
    files.compute(target, {"test": 1}, lambda done, of: None)
    return files


def trainer_of(target: Target, files: HiddenFiles, recipe: HeadsRecipe = RECIPE) -> HeadsTrainer:
    return HeadsTrainer(recipe, files, target)


def weights(heads: MedusaHeads) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in heads.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_shard_holds_the_row_and_labels_of_each_generated_token(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    files = rows_of(target, texts, tmp_path)
    shard = files.load(0, torch.device("cpu"))
    labels = shard.labels(3)
    expected = {}
    for text in texts:
        for place, token in enumerate(text.output_ids):
            expected[token, *text.output_ids[place + 1 : place + 4]] = None
    assert len(shard.rows) == sum(len(text.output_ids) for text in texts) == files.num_rows[0]
    actual = zip(shard.output_ids.tolist(), labels.tolist(), strict=True)
    assert {(token, *(label for label in row if label != NOTHING)) for token, row in actual} == set(expected)
    agree = (target.logits(shard.rows.float()).argmax(-1) == shard.output_ids).float().mean()
    assert agree > 0.95, "a row is the one that the output head turned into its token"


def test_a_stopped_computation_of_rows_resumes(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "SHARD_BYTES", 2 * target.hidden_size * 40)
    files = rows_of(target, texts, tmp_path)
    paths = sorted(tmp_path.glob("rows-*.safetensors"))
    assert len(paths) == len(files.num_rows) > 3
    before = [path.read_bytes() for path in paths]
    stamps = [path.stat().st_mtime_ns for path in paths]
    paths[1].unlink()
    rows_of(target, texts, tmp_path)
    assert [path.read_bytes() for path in paths] == before
    assert paths[0].stat().st_mtime_ns == stamps[0], "what is there is not computed again"
    HiddenFiles(tmp_path, texts, target.hidden_size, 0).compute(target, {"test": 2}, lambda done, of: None)
    assert paths[0].stat().st_mtime_ns != stamps[0], "other settings begin anew"


def test_the_loss_is_cross_entropy_and_its_gradient_that_of_the_plain_computation(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LOGITS_AT_ONCE", {"cpu": 5 * target.vocab_size})  # pieces smaller than the step
    files = rows_of(target, texts, tmp_path)
    heads = MedusaHeads.of(small.heads(trainer_of(target, files).heads.shape))
    shard = files.load(0, torch.device("cpu"))
    rows, labels = shard.rows[:32], shard.labels(2)[:32]
    loss = HeadsOptimizer(heads, RECIPE, target.logits, target.vocab_size).loss(rows, labels)
    loss.backward()
    actual = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()
    matrix = target.model.get_output_embeddings().weight.clone()
    logits = heads.logits(rows.float(), lambda x: x @ matrix.T)
    plain = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOTHING)
    plain.backward()
    torch.testing.assert_close(loss, plain)
    for ours, parameter in zip(actual, heads.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)
    assert (labels == NOTHING).any()


@pytest.mark.parametrize("shard_rows", [1000, 40])
def test_every_row_is_used_once_per_epoch(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_rows: int
) -> None:
    monkeypatch.setattr(texts_module, "SHARD_BYTES", 2 * target.hidden_size * shard_rows)
    files = rows_of(target, texts, tmp_path)
    trainer = trainer_of(target, files)
    batches = list(trainer._batches(0))
    assert len(batches) == trainer.num_steps
    per_epoch = len(batches) // RECIPE.epochs
    everything = torch.cat([files.load(n, torch.device("cpu")).rows for n in range(len(files.num_rows))]).float()
    for epoch in range(RECIPE.epochs):
        seen = torch.cat([rows for rows, _ in batches[epoch * per_epoch : (epoch + 1) * per_epoch]]).float()
        assert torch.equal(seen.sum(1).sort().values, everything.sum(1).sort().values)
    assert not torch.equal(batches[0][0], batches[per_epoch][0]), "another order in each epoch"


def test_training_learns_and_equal_seeds_give_equal_heads(target: Target, texts: list[Text], tmp_path: Path) -> None:
    files = rows_of(target, texts, tmp_path)
    recipe = replace(RECIPE, epochs=30)
    one, two, other = (trainer_of(target, files, r) for r in (recipe, recipe, replace(recipe, seed=1)))
    losses = list(one.run())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert list(two.run()) == losses
    list(other.run())
    assert same(weights(one.heads), weights(two.heads))
    assert not same(weights(one.heads), weights(other.heads))


def test_a_resumed_run_ends_with_the_same_heads(
    target: Target, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "SHARD_BYTES", 2 * target.hidden_size * 40)
    files = rows_of(target, texts, tmp_path / "rows")
    whole = trainer_of(target, files)
    list(whole.run())
    first = trainer_of(target, files)
    for _ in first.run():
        if first.step == 7:
            break
    first.save(tmp_path / "checkpoint.pt", {"of": 1})
    second = trainer_of(target, files)
    assert second.resume(tmp_path / "checkpoint.pt", {"of": 1})
    assert len(list(second.run())) == whole.num_steps - 7
    assert same(weights(second.heads), weights(whole.heads))
    assert not trainer_of(target, files).resume(tmp_path / "checkpoint.pt", {"of": 2})
    assert not trainer_of(target, files, replace(RECIPE, lr=0.5)).resume(tmp_path / "checkpoint.pt", {"of": 1})


def test_the_learning_rate_rises_and_falls() -> None:
    recipe = HeadsRecipe(lr=2.0, warmup=0.1)
    rates = [recipe.lr_at(step, 100) for step in range(100)]
    assert rates[0] == 0.2
    assert max(rates) == rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[99] < 0.01
