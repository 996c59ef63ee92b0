"""The model's tokenizer and chat template, run in a thread pool.

It reads the files of the model directly: importing transformers to tokenize would slow down the start of a router.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.adapters.formats.added_tokens import Added
from lorikeet.proto.digest import of_files
from lorikeet.proto.shares import Turns
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ChatTemplateError, ValidationError
from lorikeet.router.text.chat_template import (
    NO_OPTIONS,
    ChatTemplate,
    Rendered,
    TemplateOptions,
    find_template,
    template_of,
)
from lorikeet.router.text.detokenizer import Detokenizer, Vocabulary, detokenizer

ASSUMED_BYTES = 256
"""Per token, for tokenizers without a limit: tokenizing longer prompts would cost gigabytes."""
_NFC_SHRINKS = 4
"""At most so many bytes become one under NFC: 3.5 for U+0390, 3 for the Kelvin sign, which becomes K."""
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts"})
"""Pre-tokenizers that keep every character."""
_SPACES = tuple(
    map(
        chr, (9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
    )
)


@dataclass(frozen=True)
class TokenLength:
    """The smallest number of tokens that a text can have, without tokenizing it.

    A text of n bytes has at least n / m tokens, where m is the largest number of bytes that one token stands for. There
    is no such m where the tokenizer drops text (most normalizers of WordPiece and of older Unigram models) or where one
    token stands for any number of unknown characters.
    """

    max_bytes: int
    skips_spaces: bool = False
    """Whether an added token may stand for any number of spaces around it."""
    is_proven: bool = True
    """False where `max_bytes` is ASSUMED_BYTES."""

    def least_tokens(self, texts: list[str], enough: int) -> int:
        """The smallest number of tokens that the texts, joined, can have; exact only where it is above `enough`."""
        limit = enough * self.max_bytes
        if 4 * sum(map(len, texts)) <= limit:
            return 0
        num_bytes = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if num_bytes > limit and self.skips_spaces:
            num_bytes -= sum(text.count(space) * len(space.encode()) for text in texts for space in _SPACES)
        return -(-num_bytes // self.max_bytes)


def token_length(backend: tokenizers.Tokenizer) -> TokenLength:
    """Token length of `backend`, from its parts."""
    normalizer, pre_tokenizer = state(backend.normalizer), state(backend.pre_tokenizer)
    shrinks = _shrinks(normalizer)
    added = backend.get_added_tokens_decoder().values()
    names = set(backend.get_vocab(with_added_tokens=False))
    is_byte_level = "ByteLevel" in kinds(normalizer) | kinds(pre_tokenizer)
    if shrinks is None or not _keeps(pre_tokenizer) or not _has_all(backend.model, names, is_byte_level):
        return TokenLength(ASSUMED_BYTES, is_proven=False)
    longest = max((len(name) if is_byte_level else len(name.encode()) for name in names), default=1)
    longest = max([longest, 4, *(len(token.content.encode()) for token in added)])
    skips_spaces = any(token.lstrip or token.rstrip for token in added)
    return TokenLength(longest * shrinks, skips_spaces)


def state(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as in tokenizer.json."""
    content: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return content


def flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for step in part.get("normalizers") or part.get("pretokenizers") or [] for step in flat(step)]


def kinds(part: dict[str, Any] | None) -> set[str]:
    return {step["type"] for step in flat(part)}


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """The most bytes that the normalizer turns into one; None where it removes text."""
    factor = 1
    for step in flat(normalizer):
        match step:
            case {"type": "ByteLevel" | "Prepend"}:
                pass
            case {"type": "NFC"}:
                factor *= _NFC_SHRINKS
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
                factor *= max(1, -(-len(old.encode()) // len(new.encode())))
            case _:
                return None
    return factor


def _keeps(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether every character is part of a piece."""
    return all(
        step["type"] in _KEEPING or (step["type"] == "Split" and step.get("behavior") != "Removed")
        for step in flat(pre_tokenizer)
    )


def _has_all(model: Any, names: set[str], is_byte_level: bool) -> bool:
    """Whether unknown characters give tokens, at least one for each."""
    if is_byte_level:
        return names.issuperset(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    has_bytes = names.issuperset(f"<0x{byte:02X}>" for byte in range(256))
    match type(model).__name__:
        case "BPE":
            one_each = model.unk_token is not None and not model.fuse_unk
            return one_each or (model.byte_fallback and has_bytes)
        case "Unigram":
            return has_bytes and bool((state(model) or {}).get("byte_fallback"))
    return False


_WORD, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_CONTRACTIONS, _BLANKS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s+(?!\S)|\s+"
_LINES = r"\n+ *(?= )"
_PATTERNS = {
    "GPT-2": ("'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", _MARKS, _BLANKS),
    "Llama 3": (_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _MARKS + r"[\r\n]*", r"\s*[\r\n]+", _BLANKS),
    "Qwen2": (_CONTRACTIONS, _WORD, r"\p{N}", _MARKS + r"[\r\n]*", r"\s*[\r\n]+", _BLANKS),
    "the demo model": (_WORD, r"\p{N}{1,3}", rf"{_MARKS}(?:{_LINES}|\n+)?", _LINES, r"\n+", _BLANKS),
}
SEPARATING = frozenset(map("|".join, _PATTERNS.values()))
"""Regular expressions of which no match contains a letter before a space, and which never look back."""
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LETTER_SPACE = re.compile("[A-Za-z][ ▁]")
_MAX_TRIES = 1000


class Cuts:
    """Where texts can be cut, for one tokenizer.

    A text can be cut between an English letter and a space with another letter after it, so that the tokens of the rest
    are the last tokens of the whole text. This is proven for BPE if the pre-tokenizer separates pieces there, or if no
    token contains a letter before a space, so that no merge crosses the cut. Unigram minimizes a sum over the text: it
    has none.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._offset = _offset(backend)
        """Start of the rest after the space: 1 where the normalizer writes a space before texts; None without cuts."""

    def __bool__(self) -> bool:
        return self._offset is not None

    def before(self, text: str, position: int) -> int | None:
        """The start of the rest for the last cut before `position`; None where none is near."""
        if self._offset is None:
            return None
        for _ in range(_MAX_TRIES):
            position = text.rfind(" ", 1, position)
            if position < 0:
                return None
            if text[position - 1] in _LETTERS and text[position + 1 : position + 2] in _LETTERS:
                return position + self._offset
        return None


def _offset(backend: tokenizers.Tokenizer) -> int | None:
    model: Any = backend.model
    if type(model).__name__ != "BPE" or model.dropout or not _added_tokens_allow_it(backend):
        return None
    normalizer, pre_tokenizer = flat(state(backend.normalizer)), flat(state(backend.pre_tokenizer))
    offset = _normalized_offset(normalizer)
    if offset is None:
        return None
    if not offset and not kinds(state(backend.normalizer)) & {"Replace"} and _separates(pre_tokenizer):
        return 0
    names = backend.get_vocab(with_added_tokens=False)
    if not (names.keys() >= _LETTERS and names.keys() & {" ", "▁"}):
        return None  # unknown characters may be joined
    is_plain = all(step["type"] == "Metaspace" for step in pre_tokenizer) and not model.ignore_merges
    return offset if is_plain and not any(map(_LETTER_SPACE.search, names)) else None


def _normalized_offset(steps: list[dict[str, Any]]) -> int | None:
    """None for normalizers that could change what is next to a cut differently in the rest."""
    offset = 0
    for step in steps:
        match step:
            case {"type": "NFC"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case {"type": "Prepend", "prepend": "▁"}:
                offset = 1
            case _:
                return None
    return offset


def _separates(steps: list[dict[str, Any]]) -> bool:
    """Whether the pre-tokenizer starts a new piece at each cut, from whatever place before it starts."""
    is_cut = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                is_cut = is_cut or bool(step.get("use_regex", True))
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"}:
                if regex not in SEPARATING or step.get("invert"):
                    return False
                is_cut = True
            case {"type": "Digits"}:
                pass
            case _:
                return False
    return is_cut


def _added_tokens_allow_it(backend: tokenizers.Tokenizer) -> bool:
    """Whether no added token is found across a cut, or depends on what is around it."""
    return not any(_touches_cuts(token) for token in backend.get_added_tokens_decoder().values())


def _touches_cuts(token: tokenizers.AddedToken) -> bool:
    content: str = token.content
    if _LETTER_SPACE.search(content):
        return True
    ends: Iterable[str] = (content[:1], content[-1:])
    if token.lstrip or token.rstrip or token.single_word:
        return any(end in _LETTERS or end in " ▁" for end in ends)
    return content[:1] in (" ", "▁") and content[1:2] in _LETTERS


T = TypeVar("T")

LONG_TEXT = 1 << 16
"""Characters from which on a text is long: about 50 ms of one core. One long text is processed at a time."""


SHORT_TEXT = 512
"""Characters up to which a text is tokenized in the event loop: it takes 0.1 to 0.3 ms, and a thread as much again."""

SHORT_CONVERSATION = 8
"""Messages up to which a conversation with a short text, and nothing else, is rendered there too."""


@dataclass(eq=False, slots=True)
class _TokenizeJob:
    """One piece of work and its caller's answer."""

    caller: str
    work: Callable[[], Any]
    answer: asyncio.Future[Any]


class _Queue:
    """Threads of one kind and the jobs that wait for them."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns: Turns[_TokenizeJob] = Turns()
        self._num_running = 0

    async def run(self, work: Callable[[], Any], caller: str, charge: float) -> Any:
        """A job whose caller leaves before it starts is never started."""
        job = _TokenizeJob(caller, work, asyncio.get_running_loop().create_future())
        self._turns.push(caller, job, charge)
        self._start()
        try:
            return await job.answer
        finally:
            self._turns.remove(caller, job)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while len(self._turns) and self._num_running < self._num_threads:
            job = self._turns.pop()
            self._num_running += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(partial(self._end, job))

    def _end(self, job: _TokenizeJob, done: asyncio.Future[Any]) -> None:
        self._num_running -= 1
        error = None if done.cancelled() else done.exception()
        if not job.answer.done():
            if done.cancelled():
                job.answer.cancel()
            elif error is not None:
                job.answer.set_exception(error)
            else:
                job.answer.set_result(done.result())
        self._start()


class TextPool:
    """`num_threads` threads for short texts, and one for long ones."""

    def __init__(self, num_threads: int) -> None:
        self._short = _Queue(num_threads, "tokenize")
        self._long = _Queue(1, "tokenize-long")
        self.num_pending = 0
        """Texts that are being processed or wait for a thread."""

    async def run(self, work: Callable[[], T], caller: str, num_chars: int) -> T:
        """The result of `work`, which runs in a thread. `num_chars` is the length of its text, which is charged to the
        caller. Raises what `work` raises.
        """
        queue = self._long if num_chars >= LONG_TEXT else self._short
        self.num_pending += 1
        try:
            return cast(T, await queue.run(work, caller, num_chars))
        finally:
            self.num_pending -= 1

    def close(self) -> None:
        """Jobs that wait are cancelled."""
        self._short.close()
        self._long.close()


_ANY_ORDER = "{prefix}{before}{suffix}{after}{middle}"
_SUFFIX_FIRST = "{suffix}{after}{prefix}{before}"


@dataclass(frozen=True)
class FillInMiddle:
    """One model family's tokens."""

    prefix: str
    """Before the text that precedes the gap."""
    suffix: str
    """Before the text that follows it."""
    middle: str = ""
    """Where the output begins."""

    @classmethod
    def find(cls, backend: tokenizers.Tokenizer) -> Self | None:
        """None where the tokenizer has no such tokens."""
        for tokens in _FAMILIES:
            if all(backend.token_to_id(token) is not None for token in tokens):
                return cls(*tokens)
        return None

    def prompt(self, before: str, after: str) -> str:
        """The prompt for the text between `before` and `after`."""
        form = _ANY_ORDER if self.middle else _SUFFIX_FIRST
        return form.format(prefix=self.prefix, suffix=self.suffix, middle=self.middle, before=before, after=after)


_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)


Input = str | tuple[str, str]
"""A text, or two texts that are compared."""
MAX_CUT_CHARS = 1 << 18
"""Maximum characters of a text that is tokenized whole before it is cut."""
_GROUP_TEXTS, _GROUP_CHARS = 64, 1 << 15
"""Texts, and characters, that are tokenized by one job of a thread."""


@dataclass(frozen=True)
class Cut:
    """How texts become token ids."""

    most: int | None = None
    """Tokens that are kept, special ones included; None keeps all."""
    side: str = "right"
    """Where tokens are dropped."""
    add_special_tokens: bool = True
    has_types: bool = False
    """Whether the model gets the tokenizer's types of tokens, which tell the texts of a pair apart."""
    wants_offsets: bool = False
    """Whether the characters of each token are wanted."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a text or of a pair."""

    ids: list[int]
    second_text: int = 0
    """Index of the first token of the second text's type, 0 without any."""
    offsets: list[tuple[int, int]] = field(default_factory=list)
    """Characters of each token, (0, 0) for special ones; where wanted."""
    special: list[bool] = field(default_factory=list)
    """Whether each token was added by the tokenizer; where offsets are wanted."""


def groups(texts: Sequence[Input]) -> Iterator[list[Input]]:
    """Neighbouring texts that are tokenized together."""
    group: list[Input] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
        if len(group) >= _GROUP_TEXTS or size >= _GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_group(backend: tokenizers.Tokenizer, texts: Sequence[Input], cut: Cut) -> list[Encoded]:
    """The tokens of each. Runs in a thread; the library releases the GIL. Raises ValidationError."""
    if cut.most is not None:
        for text in texts:
            if max(map(len, (text,) if isinstance(text, str) else text)) > MAX_CUT_CHARS:
                raise ValidationError(f"a text of more than {MAX_CUT_CHARS} characters cannot be truncated")
    encode = backend.encode_batch if cut.wants_offsets else backend.encode_batch_fast
    encodings = encode(list(texts), add_special_tokens=cut.add_special_tokens)
    return [
        _encoded(encoding if cut.most is None or len(encoding) <= cut.most else _shortened(backend, text, cut), cut)
        for text, encoding in zip(texts, encodings, strict=True)
    ]


def _encoded(encoding: tokenizers.Encoding, cut: Cut) -> Encoded:
    types = encoding.type_ids if cut.has_types else ()
    second_text = types.index(1) if 1 in types else 0
    if not cut.wants_offsets:
        return Encoded(encoding.ids, second_text)
    return Encoded(encoding.ids, second_text, encoding.offsets, [bool(flag) for flag in encoding.special_tokens_mask])


def _shortened(backend: tokenizers.Tokenizer, text: Input, cut: Cut) -> tokenizers.Encoding:
    """Encoding of a truncated text or pair; the longer text is cut first (`longest_first`). Raises ValidationError."""
    assert cut.most is not None
    parts = (text,) if isinstance(text, str) else text
    plain = [backend.encode(part, add_special_tokens=False) for part in parts]
    num_added = backend.num_special_tokens_to_add(len(parts) > 1) if cut.add_special_tokens else 0
    left = cut.most - num_added
    if left < len(parts):
        raise ValidationError(f"nothing of a text is left when it is truncated to {cut.most} tokens")
    sizes = _sizes([len(part) for part in plain], left)
    for part, size in zip(plain, sizes, strict=True):
        part.truncate(size, direction=cut.side)
    second = plain[1] if len(plain) > 1 else None
    return backend.post_process(plain[0], second, add_special_tokens=cut.add_special_tokens)


def _sizes(lengths: list[int], most: int) -> list[int]:
    """What is kept of one or two texts, as by the library's `longest_first`."""
    if sum(lengths) <= most:
        return lengths
    if len(lengths) == 1:
        return [most]
    shorter, longer = sorted(lengths)
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter = most // 2
        longer = most - shorter
    return [longer, shorter] if lengths[0] > lengths[1] else [shorter, longer]


FILES = ("generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
"""What determines the token ids of a prompt and the end-of-text ids, in addition to the model's configuration."""
MAX_WHOLE_BYTES = 1 << 18
"""Maximum bytes of a text whose end is wanted and whose tokens depend on all of it."""
_TAIL_CHARS = 8
"""Per token that is wanted, at the first attempt; then four times as many."""
_MAX_TEMPLATES = 256
_HIDDEN = ("name_or_path", "auto_map")
"""Keys of tokenizer_config.json that tell about the machine that wrote it, or name code."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _content(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


class Tokenizer:
    """Encodes text, decodes ids, and renders messages as a prompt."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: frozenset[int] = frozenset(),
        special_ids: frozenset[int] = frozenset(),
        template_source: str | None = None,
        tool_template_source: str | None = None,
        response_template: Any = None,
        named_tokens: dict[str, str] | None = None,
        num_workers: int = 1,
        digest: str = "",
        information: dict[str, Any] | None = None,
        pool: TextPool | None = None,
    ) -> None:
        """`pool`: another tokenizer's, whose threads are used too."""
        self._backend = backend
        self.template_source = template_source
        """The model's chat template."""
        self.tool_template_source = tool_template_source
        """The model's chat template for requests with tools."""
        self.response_template = response_template
        """How the model's output is parsed (`response_template`), if the tokenizer's configuration says that."""
        self.named_tokens = named_tokens or {}
        """Special tokens by their names in templates."""
        self._templates: dict[str, ChatTemplate] = {}
        """Compiled templates by source: the model's and those of the operator."""
        self.digest = digest
        """Digest of the files that the tokenizer was read from."""
        self.information = information or {}
        """The tokenizer's configuration, with the chat template in use."""
        self.pool = pool or TextPool(num_workers)
        self.length = token_length(backend)
        """How long the text of a token can be."""
        self._cuts = Cuts(backend)
        self.fill_in_middle = FillInMiddle.find(backend)
        self.vocabulary = Vocabulary(backend, special_ids)
        self.special_ids = self.vocabulary.special_ids
        self.eos_ids = eos_ids
        """End-of-text tokens of the generation configuration and the tokenizer."""

    @classmethod
    def load(cls, config: RouterConfig) -> Self:
        """Read the tokenizer of the model folder. Raises ValueError where a file is missing."""
        folder = Path(config.model_path)
        settings = _read_json(folder / "tokenizer_config.json")
        backend = _load_backend(folder, settings)
        named = {**_read_json(folder / "special_tokens_map.json"), **settings}
        named_tokens = {name: text for name in _NAMED_TOKENS if (text := _content(named.get(name))) is not None}
        ids = {name: backend.token_to_id(text) for name, text in named_tokens.items()}
        _apply_bos_and_eos(backend, settings, named_tokens)
        source, tool_source = find_template(folder, settings), template_of(settings, {}, for_tools=True)
        response_template = settings.get("response_template")
        if config.tokenizer_config_path is not None:
            tokenizer_config = json.loads(Path(config.tokenizer_config_path).read_text())
            if own := template_of(tokenizer_config, {}):
                source, tool_source = own, template_of(tokenizer_config, {}, for_tools=True)
                response_template = None
            response_template = tokenizer_config.get("response_template", response_template)
        if config.chat_template is not None:
            source, tool_source = config.chat_template, None
            if problem := ChatTemplate(source, named_tokens).problem:
                raise ValueError(f"the chat template of --chat-template is invalid: {problem}")
        shown = {name: value for name, value in settings.items() if name not in _HIDDEN}
        return cls(
            backend,
            information={"tokenizer_class": None, **shown, **named_tokens, "chat_template": source or None},
            eos_ids=_eos_ids(folder, ids.get("eos_token")),
            special_ids=frozenset(token_id for token_id in ids.values() if token_id is not None),
            template_source=source or None,
            tool_template_source=tool_source,
            response_template=response_template,
            named_tokens=named_tokens,
            num_workers=config.validation_workers,
            digest=of_files(folder, [name for name in FILES if (folder / name).is_file()]),
        )

    @property
    def ids_by_token(self) -> dict[str, int]:
        """The ids of all tokens."""
        return self._backend.get_vocab(with_added_tokens=True)

    def with_added(self, added: Added) -> Self:
        """The same with an adapter's tokens, of which `added.eos` ends a text too. Takes as long as reading it."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        for token in added.tokens:
            flags = {name: value for name, value in asdict(token).items() if name not in ("content", "id")}
            backend.add_tokens([AddedToken(token.content, **flags)])
        ids = {token.content: token.id for token in added.tokens}
        if any(backend.token_to_id(content) != token_id for content, token_id in ids.items()):
            raise AdapterInvalid("the tokens that it adds do not get the ids that it gives them")
        return type(self)(
            backend,
            eos_ids=self.eos_ids | {ids[added.eos]} if added.eos else self.eos_ids,
            special_ids=self.special_ids,
            template_source=self.template_source,
            tool_template_source=self.tool_template_source,
            response_template=self.response_template,
            named_tokens=self.named_tokens,
            digest=self.digest,
            information=self.information,
            pool=self.pool,
        )

    async def encode(self, text: str, add_special_tokens: bool = True, *, caller: str = "") -> list[int]:
        """The token ids of `text`. Callers with long texts take turns."""
        if len(text) <= SHORT_TEXT:
            return self.ids(text, add_special_tokens)
        return await self.pool.run(lambda: self.ids(text, add_special_tokens), caller, len(text))

    async def encode_each(self, texts: list[str], *, caller: str = "") -> list[list[int]]:
        """The token ids of each of some short texts, without special tokens."""

        def work() -> list[list[int]]:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

        return await self.pool.run(work, caller, sum(map(len, texts)))

    async def encode_texts(self, texts: Sequence[Input], cut: Cut, *, caller: str = "") -> list[Encoded]:
        """The tokens of each text or pair of texts, some texts at a time. Raises ValidationError for a text that is too
        long to be cut.
        """
        encoded: list[Encoded] = []
        for group in groups(texts):
            num_chars = sum(len(part) for text in group for part in (text if isinstance(text, tuple) else (text,)))
            encoded += await self.pool.run(partial(encode_group, self._backend, group, cut), caller, num_chars)
        return encoded

    async def encode_tail(
        self, text: str, num_tokens: int, add_special_tokens: bool = True, *, caller: str = "", field: str = "truncate"
    ) -> list[int]:
        """The last `num_tokens` ids of `encode(text)`; only as much of the text is tokenized as that needs.

        Raises ValidationError, for the request's `field`, for a text that would have to be tokenized whole and is too
        long for that.
        """
        length = _TAIL_CHARS * (num_tokens + 8)
        has_cut = self._cuts.before(text, len(text) - length) is not None

        def work() -> list[int]:
            return self._tail(text, num_tokens, length, add_special_tokens, field)

        return await self.pool.run(work, caller, length if has_cut else len(text))

    def _tail(
        self, text: str, num_tokens: int, length: int, add_special_tokens: bool = True, field: str = "truncate"
    ) -> list[int]:
        num_added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        while 2 * length < len(text):
            start = self._cuts.before(text, len(text) - length)
            if start is not None:
                ids = self.ids(text[start:], add_special_tokens)
                if len(ids) - num_added >= num_tokens:
                    return ids[-num_tokens:]
            length *= 4
        limit = max(MAX_WHOLE_BYTES, num_tokens * self.length.max_bytes)
        if len(text) > limit or len(text.encode()) > limit:
            raise ValidationError(
                f"the text has more than {limit} bytes and cannot be truncated to {num_tokens} tokens, because they "
                "depend on all of it: send only the end of the text",
                field,
            )
        return self.ids(text, add_special_tokens)[-num_tokens:]

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`. Call it in `pool`, except for short texts."""
        # The batch functions release the GIL; `encode` does not. The fast one skips offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, str, int, int]]:
        """(id, raw vocabulary text, start, stop) per token; offsets count characters. Call it in `pool`."""
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        spans = zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)
        return [(token_id, raw, start, stop) for token_id, raw, (start, stop) in spans]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` with special tokens, as transformers decodes it. Call it in `pool`."""
        text: str = self._backend.decode_batch([ids], skip_special_tokens=False)[0]
        return text

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        options: TemplateOptions = NO_OPTIONS,
        *,
        source: str | None = None,
        caller: str = "",
    ) -> Rendered:
        """The prompt for `messages`, with the model's template or the operator's at `source`.

        Raises ChatTemplateError, also when there is no template.
        """
        source = source or self.template_source
        if source is None:
            raise ChatTemplateError("the model has no chat template")

        def work() -> Rendered:
            template = self._compiled(source)
            return Rendered(template.render(messages, options), template.unread(options.variables))

        num_chars = sum(len(message.get("content") or "") for message in messages) + options.num_chars
        if num_chars <= SHORT_TEXT and _is_short(messages) and source in self._templates:  # compiled before
            return work()
        return await self.pool.run(work, caller, num_chars)

    def _compiled(self, source: str) -> ChatTemplate:
        template = self._templates.get(source)
        if template is None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            template = self._templates[source] = ChatTemplate(source, self.named_tokens)
        return template

    def token_text(self, token_id: int) -> str:
        """The text of a single token."""
        return self.vocabulary.text(token_id)

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """For text that continues `prompt_ids`."""
        return detokenizer(self.vocabulary, prompt_ids)

    def close(self) -> None:
        self.pool.close()


def _load_backend(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json: convert the model's tokenizer to a fast one")
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    declared = settings.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(token["content"]) is None:
            flags = {name: token[name] for name in ("lstrip", "rstrip", "normalized", "single_word") if name in token}
            backend.add_tokens([AddedToken(token["content"], special=token.get("special", False), **flags)])
    return backend


def _apply_bos_and_eos(backend: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Apply `add_bos_token` and `add_eos_token`, where set, which override the post-processor."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    plain = backend.encode("a", add_special_tokens=False).tokens
    before = [named["bos_token"]] if settings.get("add_bos_token") and "bos_token" in named else []
    after = [named["eos_token"]] if settings.get("add_eos_token") and "eos_token" in named else []
    if backend.encode("a").tokens == [*before, *plain, *after]:
        return
    special = [(text, backend.token_to_id(text)) for text in dict.fromkeys(before + after)]
    single = [*before, "$A", *after]
    pair = [*before, "$A", *after, *(f"{text}:1" for text in before), "$B:1", *(f"{text}:1" for text in after)]
    backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    declared = _read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = _read_json(folder / "config.json").get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(token_id for token_id in [*ids, tokenizer_eos] if token_id is not None)


async def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str], caller: str = "") -> tuple[tuple[int, ...], ...]:
    """The token sequences that must not occur, without duplicates.

    The word after a space counts only where it is another single token, or a sequence of the same length that begins
    with another token: otherwise the space is a token of its own, and the first sequence covers both.
    """
    unique: dict[tuple[int, ...], None] = {}
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    sequences = list(map(tuple, await tokenizer.encode_each(texts, caller=caller))) if texts else []
    for bare, spaced in zip(sequences[::2], sequences[1::2], strict=True):
        unique[bare] = None
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            unique[spaced] = None
    return tuple(ids for ids in unique if ids)


def _is_short(messages: list[dict[str, Any]]) -> bool:
    """Whether there are few messages, which have nothing but a text: calls of tools may be long."""
    return len(messages) <= SHORT_CONVERSATION and all(
        message.keys() == {"role", "content"} and isinstance(message["content"], str) for message in messages
    )
