"""Text to ids and back in T5's conventions: SentencePiece with sentinels, or bytes."""

import dataclasses
import functools
import io
import json
import pathlib
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from specjax import errors
from specjax.data import characters

# What a tokenizer may need of its folder.
FILES = MODEL_FILE, SETTINGS_FILE = "spiece.model", "tokenizer_config.json"
PAD_ID = 0
EOS_ID = 1
UNK_ID = 2

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_SENTINEL_PIECE = re.compile(r"▁?<extra_id_(\d+)>")
# Protocol buffers merge when joined. This one says: field 3 of the model (normaliser),
# 2 bytes, field 3 of it (add_dummy_prefix) is false.
_NO_DUMMY_PREFIX = bytes([3 << 3 | 2, 2, 3 << 3, 0])
_UNKNOWN_TEXT = " ⁇ "


class Tokenizer(Protocol):
    """What the rest of specjax asks of a tokenizer.

    Attributes:
        vocab_size: how many ids have a meaning, sentinels included; a model may have
            more rows than that.
        pad_id: id of padding.
        eos_id: id of the end of a sequence.
        unk_id: id of what the vocabulary cannot spell.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def unk_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The text's ids, ending in exactly one end-of-sequence id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text up to the first end-of-sequence id, padding left out."""
        ...

    def decode_pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds to what stands before it."""
        ...

    def piece(self, index: int) -> str:
        """The vocabulary entry of an id, in the vocabulary's own spelling."""
        ...


def _checked(ids: Sequence[int], vocab_size: int) -> Iterator[int]:
    for position, index in enumerate(ids):
        index = int(index)
        if not 0 <= index < vocab_size:
            raise errors.InputError(
                f"id {index} at position {position} has no piece: the tokenizer knows"
                f" ids 0 to {vocab_size - 1}"
            )
        yield index


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer:
    """A SentencePiece model with T5's sentinels counted down from the last id.

    Where the model file itself holds sentinel pieces (mT5), none are added. Text that
    spells a sentinel (`<extra_id_0>`) becomes its id; other control pieces in a text
    are plain text, so no text can end a sequence early.

    Attributes:
        model: the content of a `spiece.model` file.
        num_sentinels: how many sentinels follow the model's own pieces.
    """

    model: bytes = dataclasses.field(repr=False)
    num_sentinels: int = 100

    @classmethod
    def from_file(
        cls, path: str | pathlib.Path, num_sentinels: int = 100
    ) -> "SentencePieceTokenizer":
        """Reads a `spiece.model` file.

        Args:
            path: the file.
            num_sentinels: how many sentinels to add; see the class.

        Returns:
            The tokenizer.

        Raises:
            InputError: the file is absent, no SentencePiece model, or has other special
                ids than T5.
        """
        path = pathlib.Path(path)
        if not path.is_file():
            raise errors.InputError(f"tokenizer file {path} does not exist")
        tokenizer = cls(path.read_bytes(), num_sentinels)
        try:
            processor = tokenizer._processor
        except (RuntimeError, ValueError) as error:
            raise errors.InputError(
                f"{path} is not a SentencePiece model: it cannot be parsed"
            ) from error
        found = (processor.pad_id(), processor.eos_id(), processor.unk_id())
        if found != (PAD_ID, EOS_ID, UNK_ID):
            raise errors.InputError(
                f"{path} has pad, eos, unk at ids {found}; T5 needs"
                f" {(PAD_ID, EOS_ID, UNK_ID)}"
            )
        return tokenizer

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor()
        if not self.model or not processor.LoadFromSerializedProto(self.model):
            raise ValueError("not a SentencePiece model")
        return processor

    @functools.cached_property
    def _joining_processor(self) -> Any:
        # Encodes text that follows a sentinel without a space between.
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(self.model + _NO_DUMMY_PREFIX)
        return processor

    @functools.cached_property
    def _pieces(self) -> tuple[str, ...]:
        size = self._processor.get_piece_size()
        own = [self._processor.id_to_piece(index) for index in range(size)]
        if any(_SENTINEL_PIECE.fullmatch(piece) for piece in own):
            return tuple(own)
        added = [f"<extra_id_{k}>" for k in reversed(range(self.num_sentinels))]
        return tuple(own + added)

    @functools.cached_property
    def _sentinels(self) -> dict[str, int]:
        found = {}
        for index, piece in enumerate(self._pieces):
            match = _SENTINEL_PIECE.fullmatch(piece)
            if match:
                found[match.group().removeprefix("▁")] = index
        return found

    @functools.cached_property
    def _texts(self) -> tuple[str | int, ...]:
        """Each id's text, or its value where the piece is a single byte."""
        texts: list[str | int] = []
        for index, piece in enumerate(self._pieces):
            if _SENTINEL_PIECE.fullmatch(piece):
                texts.append(piece.removeprefix("▁"))
            elif index == UNK_ID:
                texts.append(_UNKNOWN_TEXT)
            elif self._processor.is_control(index):
                texts.append("")
            elif self._processor.is_byte(index):
                texts.append(int(piece[1:-1], 16))
            else:
                texts.append(piece.replace("▁", " "))
        return tuple(texts)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def pad_id(self) -> int:
        return PAD_ID

    @property
    def eos_id(self) -> int:
        return EOS_ID

    @property
    def unk_id(self) -> int:
        return UNK_ID

    def piece(self, index: int) -> str:
        """The vocabulary entry of an id, spaces shown as `▁`."""
        return self._pieces[next(_checked([index], self.vocab_size))]

    def encode(self, text: str) -> list[int]:
        """The text's ids, ending in exactly one end-of-sequence id.

        As in T5, line ends and repeated spaces become one space, and what the
        vocabulary cannot spell becomes `unk_id`.

        Raises:
            InputError: half of a surrogate pair, which is no text.
        """
        characters.check_text(text)
        ids: list[int] = []
        start = 0
        for match in _SENTINEL.finditer(text):
            if match.group() in self._sentinels:
                ids += self._encode_between(text[start : match.start()], start > 0)
                ids.append(self._sentinels[match.group()])
                start = match.end()
        return [*ids, *self._encode_between(text[start:], start > 0), EOS_ID]

    def _encode_between(self, text: str, follows_sentinel: bool) -> list[int]:
        joined = follows_sentinel and not text[:1].isspace()
        processor = self._joining_processor if joined else self._processor
        return list(processor.encode(text))

    def decode_pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds to what stands before it.

        Args:
            ids: token ids; those from the first end-of-sequence id on add nothing.

        Returns:
            As many texts as ids; joined they are `decode(ids)`. A character of several
            bytes belongs to the id that completes it.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        parts: list[str | int] = []
        started = False
        for index in _checked(ids, self.vocab_size):
            if index == EOS_ID:
                break
            part = self._texts[index]
            if isinstance(part, str) and not started:
                # The space that opens a sequence is the tokenizer's own.
                part = part.removeprefix(" ")
            started = started or self._texts[index] != ""
            parts.append(part)
        return characters.whole_characters(parts, len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text up to the first end-of-sequence id, padding left out."""
        return "".join(self.decode_pieces(ids))


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """ByT5's tokenizer: UTF-8 bytes from id 3 on, then sentinels counted upwards.

    `<extra_id_0>` is id 259, as `transformers` has it (T5 counts downwards instead).

    Attributes:
        num_sentinels: how many sentinels follow the bytes.
    """

    num_sentinels: int = 125

    @property
    def vocab_size(self) -> int:
        return self._first_sentinel + self.num_sentinels

    @property
    def _first_sentinel(self) -> int:
        return 3 + 256

    @property
    def pad_id(self) -> int:
        return PAD_ID

    @property
    def eos_id(self) -> int:
        return EOS_ID

    @property
    def unk_id(self) -> int:
        return UNK_ID

    def piece(self, index: int) -> str:
        """`<pad>`, `</s>`, `<unk>`, a byte as `<0x41>`, or a sentinel."""
        index = next(_checked([index], self.vocab_size))
        if index < 3:
            return ("<pad>", "</s>", "<unk>")[index]
        if index < self._first_sentinel:
            return f"<0x{index - 3:02X}>"
        return f"<extra_id_{index - self._first_sentinel}>"

    @functools.cached_property
    def _sentinels(self) -> dict[str, int]:
        numbers = range(self.num_sentinels)
        return {f"<extra_id_{n}>": self._first_sentinel + n for n in numbers}

    def encode(self, text: str) -> list[int]:
        """The text's ids, ending in exactly one end-of-sequence id.

        Raises:
            InputError: half of a surrogate pair, which is no text.
        """
        characters.check_text(text)
        ids: list[int] = []
        start = 0
        for match in _SENTINEL.finditer(text):
            if match.group() in self._sentinels:
                ids += [byte + 3 for byte in text[start : match.start()].encode()]
                ids.append(self._sentinels[match.group()])
                start = match.end()
        return [*ids, *(byte + 3 for byte in text[start:].encode()), EOS_ID]

    def decode_pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds; see `SentencePieceTokenizer.decode_pieces`.

        Bytes that are no UTF-8 show as the replacement character.
        """
        parts: list[str | int] = []
        first_sentinel = self._first_sentinel
        for index in _checked(ids, self.vocab_size):
            if index == EOS_ID:
                break
            if 3 <= index < first_sentinel:
                parts.append(index - 3)
            elif index == UNK_ID:
                parts.append(_UNKNOWN_TEXT)
            else:
                parts.append("" if index == PAD_ID else self.piece(index))
        return characters.whole_characters(parts, len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text up to the first end-of-sequence id, padding left out."""
        return "".join(self.decode_pieces(ids))


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    path: str | pathlib.Path,
    *,
    seed: int = 0,
) -> None:
    """Trains a unigram SentencePiece model with T5's special ids and normalisation.

    Every printable ASCII character gets a piece, so that no plain English text holds
    an unknown one. One thread gives the same pieces on every run.

    Args:
        texts: training texts; lines longer than 4,192 bytes are not used.
        vocab_size: pieces of the file, pad, eos and unk included, sentinels not.
        path: where to write the model (`spiece.model`).
        seed: of the trainer's random numbers.

    Raises:
        InputError: the texts are too few for so many pieces, or the other way round.
    """
    import sentencepiece

    if vocab_size < 100:
        raise errors.InputError(
            f"vocab_size {vocab_size} is too small: at least 100 pieces are needed for"
            " the printable characters"
        )
    sentencepiece.set_random_generator_seed(seed)
    buffer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=buffer,
            model_type="unigram",
            vocab_size=vocab_size,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            character_coverage=1.0,  # every character has a piece
            required_chars="".join(
                sorted(set(string.printable) - set(string.whitespace))
            ),
            normalization_rule_name="nmt_nfkc",
            num_threads=1,  # more would make the result depend on their timing
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("] ")[-1].strip()
        raise errors.InputError(
            f"SentencePiece cannot make {vocab_size} pieces from these texts: {reason}"
        ) from error
    pathlib.Path(path).write_bytes(buffer.getvalue())


def load_tokenizer(directory: str | pathlib.Path) -> Tokenizer:
    """Loads the tokenizer of a checkpoint directory.

    Args:
        directory: holds `spiece.model`, or a `tokenizer_config.json` whose
            `tokenizer_class` is ByT5Tokenizer. `extra_ids` in the latter file is the
            number of sentinels; otherwise 100, or 125 for bytes.

    Raises:
        InputError: neither file is there, or one cannot be read.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise errors.InputError(f"there is no folder {directory}")
    settings: dict[str, Any] = {}
    settings_path = directory / SETTINGS_FILE
    if settings_path.is_file():
        try:
            settings = json.loads(settings_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise errors.InputError(f"{settings_path} is not JSON: {error}") from error
        if not isinstance(settings, dict):
            raise errors.InputError(f"{settings_path} is not a JSON object")
    num_sentinels = settings.get("extra_ids")
    # type: a bool is an int to isinstance.
    if type(num_sentinels) not in (int, type(None)) or (num_sentinels or 0) < 0:
        raise errors.InputError(
            f"{settings_path} has extra_ids {num_sentinels!r}; it must be 0 or more"
        )
    if str(settings.get("tokenizer_class", "")).startswith("ByT5Tokenizer"):
        return ByteTokenizer(125 if num_sentinels is None else num_sentinels)
    model_path = directory / MODEL_FILE
    if model_path.is_file():
        return SentencePieceTokenizer.from_file(
            model_path, 100 if num_sentinels is None else num_sentinels
        )
    raise errors.InputError(
        f"{directory} holds no tokenizer: it needs spiece.model, or a"
        ' tokenizer_config.json with "tokenizer_class": "ByT5Tokenizer"'
    )


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Checks that every id means the same to both models.

    Args:
        target: the target's tokenizer.
        draft: the draft's tokenizer.

    Raises:
        InputError: names the first id that differs and both of its pieces.
    """
    for index in range(max(target.vocab_size, draft.vocab_size)):
        pieces = [
            repr(tokenizer.piece(index)) if index < tokenizer.vocab_size else "no piece"
            for tokenizer in (target, draft)
        ]
        if pieces[0] != pieces[1]:
            raise errors.InputError(
                f"draft and target have different tokenizers: id {index} is {pieces[0]}"
                f" for the target and {pieces[1]} for the draft; train or load a draft"
                " with the target's tokenizer"
            )


def dead_from(
    tokenizer: Tokenizer, rows: int, pad_id: int, eos_id: int, role: str = "target"
) -> int | None:
    """The id from which on a model's rows are padding; None: no row is.

    Args:
        tokenizer: the model's own.
        rows: of the model's vocabulary.
        pad_id, eos_id: of the model; padding starts a text too.
        role: target or draft, for the message.

    Raises:
        InputError: an id without a row, or another padding or end of a text.
    """
    for name, own in (("pad_id", pad_id), ("eos_id", eos_id)):
        if own != getattr(tokenizer, name):
            raise errors.InputError(
                f"the {role}'s config has {name} {own} and its tokenizer "
                f"{getattr(tokenizer, name)}: they do not belong together"
            )
    known = tokenizer.vocab_size
    if known > rows:
        raise errors.InputError(
            f"the {role}'s tokenizer has {known} ids and its model {rows} rows: they "
            "do not belong together"
        )
    return known if known < rows else None
