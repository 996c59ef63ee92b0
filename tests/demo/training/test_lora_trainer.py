"""An adapter is a function of seed and recipe: repeated or resumed, it ends with the same weights. On a toy base."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data.packing import NO_LABEL, pack
from lorikeet.demo.data.tasks.example import Example
from lorikeet.demo.training import lora
from lorikeet.demo.training.heads_loss import HeadsLoss
from lorikeet.demo.training.lora import LoraRecipe
from lorikeet.demo.training.lora_trainer import Companion, LoraTrainer
from lorikeet.demo.training.model import BASE_FOLDER, base_config

RECIPE = LoraRecipe("citation", 4, 8, ("q_proj", "down_proj"), num_steps=12, groups_per_step=1, warmup_steps=2, lr=1e-2)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


def groups(step: int) -> Sequence[Sequence[Example]]:
    return [[Example(f"say {step % 3}\n", "one two three four", frozenset())]]


def toy_trainer(
    tokenizer: PreTrainedTokenizerFast, seed: int = 0, recipe: LoraRecipe = RECIPE, companion: Companion | None = None
) -> LoraTrainer:
    torch.manual_seed(5)
    config = base_config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    base = LlamaForCausalLM(config)
    torch.manual_seed(seed)
    return LoraTrainer(lora.attach(base, recipe), tokenizer, recipe, groups, companion)


def run(trainer: LoraTrainer, num_steps: int) -> list[float]:
    return [trainer.run_step().loss for _ in range(num_steps)]


def weights(trainer: LoraTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(tokenizer: PreTrainedTokenizerFast) -> None:
    trainers = [toy_trainer(tokenizer), toy_trainer(tokenizer), toy_trainer(tokenizer, seed=1)]
    for trainer in trainers:
        run(trainer, 4)
    one, two, other = map(weights, trainers)
    assert same(one, two)
    assert not same(one, other)


@pytest.mark.parametrize("with_heads", [False, True])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, with_heads: bool
) -> None:
    heads = [HeadsLoss(2, 32, share=0.5) if with_heads else None for _ in range(3)]
    companions = [None if module is None else Companion(module, 1e-3) for module in heads]
    whole, first, second = (toy_trainer(tokenizer, companion=companion) for companion in companions)
    run(whole, RECIPE.num_steps)
    run(first, 5)
    first.save(tmp_path / "checkpoint.pt")
    second.resume(tmp_path / "checkpoint.pt")
    assert second.step == 5
    run(second, RECIPE.num_steps - 5)
    assert same(weights(whole), weights(second))
    if heads[0] is not None and heads[2] is not None:
        assert same(heads[0].state_dict(), heads[2].state_dict())


def test_a_checkpoint_of_another_recipe_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = toy_trainer(tokenizer)
    run(trainer, 1)
    trainer.save(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="another recipe"):
        toy_trainer(tokenizer, recipe=replace(RECIPE, lr=1e-4)).resume(tmp_path / "checkpoint.pt")


def test_only_the_adapter_learns_and_it_does(tokenizer: PreTrainedTokenizerFast) -> None:
    trainer = toy_trainer(tokenizer, recipe=replace(RECIPE, num_steps=60))
    frozen = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    losses = run(trainer, 60)
    assert losses[-1] < losses[0] - 0.3
    assert same(frozen, {name: p for name, p in trainer.model.named_parameters() if not p.requires_grad})


def test_a_companion_learns_and_affects_the_adapter(tokenizer: PreTrainedTokenizerFast) -> None:
    heads = HeadsLoss(2, 32, share=1.0)
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    alone, together = toy_trainer(tokenizer), toy_trainer(tokenizer, companion=Companion(heads, 1e-2))
    run(alone, 6)
    run(together, 6)
    assert not same(before, heads.state_dict())
    assert not same(weights(alone), weights(together))


@pytest.mark.parametrize("recipe", [RECIPE, replace(RECIPE, use_rslora=True), replace(RECIPE, use_dora=True)])
def test_what_is_saved_is_what_was_trained(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, recipe: LoraRecipe
) -> None:
    trainer = toy_trainer(tokenizer, recipe=recipe)
    base = LlamaForCausalLM(trainer.model.get_base_model().config)
    base.load_state_dict(
        {
            name.replace(".base_layer", ""): value
            for name, value in trainer.model.get_base_model().state_dict().items()
            if "lora_" not in name
        }
    )
    run(trainer, 4)
    lora.save(trainer.model, tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        lora.WEIGHTS_FILE,
    ]
    ids = torch.tensor([[0, 40, 50, 60, 70]])
    with torch.inference_mode():
        trained = trainer.model.eval()(ids).logits
        plain = base.eval()(ids).logits
        loaded = lora.load(base, tmp_path / "adapter")(ids).logits
    torch.testing.assert_close(loaded, trained, atol=2e-2, rtol=2e-2)
    assert (loaded - trained).abs().max() < 0.2 * (plain - trained).abs().max()


def test_an_adapter_with_invocation_tokens_learns_where_peft_activates_it(tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = replace(RECIPE, invocation="\ncheck:\n", bf16=False)
    tokens = tokenizer(recipe.invocation, add_special_tokens=False)["input_ids"]
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    model = lora.attach(base, recipe, tokens)
    examples = [[Example(f"x = {value}{recipe.invocation}", "one two", frozenset())] for value in ("3", "a + b + c")]
    trainer = LoraTrainer(model, tokenizer, recipe, lambda _: examples)
    with torch.no_grad():
        for parameter in weights_of(trainer):
            parameter.normal_(std=0.1)
        batch = pack(examples, tokenizer)
        logits = model(batch.input_ids, attention_mask=batch.mask, position_ids=batch.position_ids).logits
        answers = batch.labels != NO_LABEL
        wanted = torch.nn.functional.cross_entropy(logits[answers], batch.labels[answers])
        with model.disable_adapter():
            bare = model(batch.input_ids, attention_mask=batch.mask, position_ids=batch.position_ids).logits
    for row, example in enumerate(examples):
        start = len(tokenizer(example[0].prompt)["input_ids"]) - len(tokens)
        same_as_base = (logits[row] == bare[row]).all(-1)
        assert same_as_base[:start].all()
        assert not same_as_base[start:].any()
    assert trainer.run_step().loss == pytest.approx(wanted.item(), rel=1e-5)


def weights_of(trainer: LoraTrainer) -> list[torch.Tensor]:
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
