# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE, the GPT-2 tokeniser, with the vocabulary and the merges that a GGUF file carries.

Text is cut into words, the UTF-8 bytes of a word are spelled with one printable character a byte, and
inside a word the adjacent pair that was learned first is merged until no learned pair is left. Names of
special tokens that occur in the text get no special treatment: they are encoded as the text they are.
"""

import re
import unicodedata

from errors import CaptureError

_CONTRACTION = re.compile(r"'(?:s|t|re|ve|m|ll|d)")
_PRE_TOKENISERS = ("smollm",)


def _byte_spelling():
    """The character that stands for each byte value 0..255: itself if it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    spelling.update({byte: chr(0x100 + i) for i, byte in enumerate(others)})
    return spelling


def _kind(character):
    """The character classes that words are made of: letter (\\p{L}), digit (\\p{N}), space (\\s), other."""
    category = unicodedata.category(character)
    if category[0] == "L":
        return "letter"
    if category[0] == "N":
        return "digit"
    if category[0] == "Z" or character in "\t\n\v\f\r\x85":
        return "space"
    return "other"


def split_words(text):
    """Cut `text` into words as the `smollm` pre-tokeniser does; the words joined give the text again.

    Each digit is a word of its own and ends what stands before it. Between digits the rule is that of GPT-2:
    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+
    """
    kinds = [_kind(character) for character in text]
    kinds.append("digit")  # the end of the text ends a word as a digit does

    def run_end(start):
        end = start
        while kinds[end] == kinds[start] and end < len(text):
            end += 1
        return end

    words, start = [], 0
    while start < len(text):
        contraction = _CONTRACTION.match(text, start)
        if contraction:
            end = contraction.end()
        elif kinds[start] == "digit":
            end = start + 1
        elif kinds[start] == "space":
            end = run_end(start)
            if kinds[end] != "digit":  # the last space before a word is left to that word
                if end - start > 1:
                    end -= 1
                elif text[start] == " ":
                    end = run_end(end)
        else:
            end = run_end(start)
        words.append(text[start:end])
        start = end
    return words


class Tokenizer:
    """Text to token ids, from the `tokenizer.ggml.*` fields of a GGUF file."""

    def __init__(self, field):
        """`field(name)` gives the value of a GGUF field, or None if the file does not have it."""
        kind, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
        if kind != "gpt2" or pre not in _PRE_TOKENISERS:
            known = ", ".join(_PRE_TOKENISERS)
            raise CaptureError(
                f"unsupported tokeniser {kind!r} with pre-tokeniser {pre!r} (supported: 'gpt2' with {known})"
            )
        tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
        if not tokens or not merges:
            raise CaptureError("the GGUF file lacks the vocabulary or the merges of its tokeniser")
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._spelling = _byte_spelling()
        self._prefix = [field("tokenizer.ggml.bos_token_id")] if field("tokenizer.ggml.add_bos_token") else []
        self._known_words = {}

    def encode(self, text):
        """The token ids of `text` as a list, after the begin-of-text token if the file asks for one."""
        ids = list(self._prefix)
        for word in split_words(text):
            if word not in self._known_words:
                self._known_words[word] = self._encode_word(word)
            ids.extend(self._known_words[word])
        return ids

    def _encode_word(self, word):
        parts = [self._spelling[byte] for byte in word.encode()]
        unlearned = len(self._ranks)
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:]))
            rank, at = min((self._ranks.get(pair, unlearned), i) for i, pair in enumerate(pairs))
            if rank == unlearned:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        unknown = [part for part in parts if part not in self._ids]
        if unknown:
            raise CaptureError(f"the model's vocabulary has no token for a part of the word {word!r}")
        return [self._ids[part] for part in parts]
