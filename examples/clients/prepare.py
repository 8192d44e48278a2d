"""Turns files into the tensors that the example models expect, and nothing else.

Each function says what the model's authors do in their own package; the clients beside this file and the
tests share it.
"""

import json
import unicodedata
from pathlib import Path

import numpy as np
from PIL import Image


def page(image: Image.Image) -> np.ndarray:
    """A picture of a page as FP32[3, 224, 224], for the model `orientation`.

    The shorter side becomes 256 pixels, the middle 224 x 224 are cut out; channels are blue, green, red.
    """
    image = image.convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.LANCZOS)
    left, top = ((side - 224) // 2 for side in image.size)
    image = image.crop((left, top, left + 224, top + 224))
    pixels = np.asarray(image, dtype=np.float32)[:, :, ::-1] / 255
    mean = np.array([0.485, 0.456, 0.406], np.float32)
    deviation = np.array([0.229, 0.224, 0.225], np.float32)
    return np.ascontiguousarray(((pixels - mean) / deviation).transpose(2, 0, 1))


def file_bytes(content: bytes) -> np.ndarray:
    """The content of a file as INT32[2048], for the model `file_type`.

    Whitespace at both ends is dropped; then come the first 1024 bytes and the last 1024, each filled up
    with 256 on its open side.
    """
    head = np.frombuffer(content[:4096].lstrip()[:1024], np.uint8)
    tail = np.frombuffer(content[-4096:].rstrip()[-1024:], np.uint8)
    tensor = np.full(2048, 256, np.int32)
    tensor[: len(head)] = head
    tensor[2048 - len(tail) :] = tail
    return tensor


class WordPieces:
    """The tokenizer of BERT (lower case), from the vocabulary in a `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        self.vocabulary = json.loads(path.read_text())["model"]["vocab"]

    def words(self, text: str) -> list[str]:
        """Lower-case words without accents; each punctuation mark is a word."""
        plain = unicodedata.normalize("NFD", text.lower())
        spaced = ""
        for letter in plain:
            kind = unicodedata.category(letter)
            if kind == "Mn":
                continue
            is_mark = kind.startswith("P") or letter in "$+<=>^`|~"
            spaced += f" {letter} " if is_mark else letter
        return spaced.split()

    def pieces(self, word: str) -> list[int]:
        """The longest known beginnings of a word, one after the other; [UNK] where there is none."""
        found = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            end = next((e for e in range(len(word), start, -1) if prefix + word[start:e] in self.vocabulary), None)
            if end is None:
                return [self.vocabulary["[UNK]"]]
            found.append(self.vocabulary[prefix + word[start:end]])
            start = end
        return found

    def batch(self, sentences: list[str]) -> dict[str, np.ndarray]:
        """The three INT64[batch, sequence] inputs of the model `text_embedding`."""
        rows = []
        for sentence in sentences:
            middle = [piece for word in self.words(sentence) for piece in self.pieces(word)]
            rows.append([self.vocabulary["[CLS]"], *middle[:254], self.vocabulary["[SEP]"]])
        longest = max(map(len, rows))
        ids = np.zeros((len(rows), longest), np.int64)
        mask = np.zeros_like(ids)
        for line, row in enumerate(rows):
            ids[line, : len(row)] = row
            mask[line, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def sentence_vectors(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """FP32[batch, 384] of length 1 out of `last_hidden_state`: the mean over the tokens that count."""
    weights = mask[:, :, np.newaxis].astype(np.float32)
    mean = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def tone(samples: int, rate: int = 16000) -> np.ndarray:
    """FP32[samples] of something between -1 and 1 that rises and falls like a vowel, for `voice_activity`."""
    time = np.arange(samples) / rate
    glottis = sum(np.sin(2 * np.pi * 120 * k * time) / k for k in range(1, 20))
    return (0.2 * glottis * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * time))).astype(np.float32)
