"""Tokenising pieces of text so that they can be joined into a prompt or a row of an exact number of tokens."""

from __future__ import annotations

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from subquad.errors import DataError


class PieceEncoder:
    """Turns pieces of text into the tokens they have in the middle of a text.

    A piece that is tokenised alone may get a beginning-of-text token or, from a SentencePiece tokenizer, a space that
    is not there. So every piece is tokenised behind a few words and cut off again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer.

        Args:
            tokenizer: Any Hugging Face tokenizer.
        """
        self.tokenizer = tokenizer
        # A list of its own: a cache on the method would keep every tokenizer alive.
        self._encode = lru_cache(maxsize=65_536)(self._encode_plain)

    def start(self, text: str) -> list[int]:
        """Tokenise the beginning of a prompt, with the special tokens the tokenizer puts before a text by default.

        Args:
            text: The text.

        Returns:
            Its tokens; special tokens the tokenizer puts after a text are left out.

        Raises:
            DataError: The text's tokens are not a part of its tokens with special tokens.
        """
        plain = list(self._encode(text))
        full = self._ids(text, special=True)
        for first in range(len(full) - len(plain) + 1):
            if full[first : first + len(plain)] == plain:
                return full[:first] + plain
        raise DataError(
            f"the tokenizer changes {text!r} when it adds special tokens; pieces of text cannot be joined with it"
        )

    def after(self, before: str, text: str) -> list[int]:
        """Tokenise a text that follows another.

        Args:
            before: What stands before it; the last words are enough.
            text: The text, with its leading space if it has one.

        Returns:
            The tokens of `text` alone.

        Raises:
            DataError: The tokenizer merges the end of `before` with the beginning of `text`.
        """
        head, both = self._encode(before), self._encode(before + text)
        if both[: len(head)] != head:
            raise DataError(
                f"the tokenizer has no boundary between {before!r} and {text!r}, so a prompt of an exact length cannot "
                "be built with it. Use another tokenizer."
            )
        return list(both[len(head) :])

    def is_blank(self, token: int) -> bool:
        """Return whether a token is nothing but white space."""
        return not self.tokenizer.decode([token]).strip()

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._ids(text, special=False))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
