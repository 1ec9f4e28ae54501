# SPDX-License-Identifier: Apache-2.0
"""oscard under an unmodified `model.generate()` of Hugging Face transformers (5.24 or newer).

    worker = Worker(model)                          # a causal model of full attention: Llama, Qwen2, Qwen3, ...
    with worker.cache(input_ids, attention_mask) as cache:
        output = model.generate(input_ids, attention_mask=attention_mask, cache=cache, max_new_tokens=100)
        cache.hit_tokens                            # of each prompt: so many tokens were cached

The model's K/V is kept in the daemon, never in torch: what of a prompt is cached is not computed, new tokens are stored
as they come, and attention reads the pages in place. Any other process with an equal model finds them. Extension points
of transformers carry it: the attention function "oscar" (AttentionInterface), a Cache of Cache layers, and forward
hooks that see the token ids. Without such a cache the model computes as before, by SDPA.

- `Worker(model, ...)`: connects, names the model (identity.py: digests of weights and RoPE), attaches to it. One a
  model.
- `Worker.cache(input_ids, attention_mask=None, dense_tail=None, wait_ms=0)`: an `OscarCache`: one sequence a row of the
  batch. Rows may be padded on the left. Give `generate()`, or the model's forward, the same ids and mask.
- `OscarCache`: `hit_tokens`, `info()` (lengths of each sequence), `settle()` (waits until what can be packed is),
  `close()`. Beam search, several return sequences, chunked prefill, and more turns on the same cache work; dropping
  tokens (`crop`, assisted decoding) does not. Inference only.

Rows are stored as the model's own 16-bit type; those of a float32 model as FP16, which keeps three more bits than BF16
(the daemon refuses K and V over 65,000 in either). `dtype` chooses another one.
"""

from .cache import OscarCache
from .identity import rope_digest, weights_digest
from .worker import Worker

__all__ = ["OscarCache", "Worker", "rope_digest", "weights_digest"]
