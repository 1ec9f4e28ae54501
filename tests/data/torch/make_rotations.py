#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the file of K (format 1) and that of V (format 2) beside itself with torch.save(): 2 layers, 2 KV heads, 64 dims.

Every rotation is a permutation of rows with signs, so its elements are exact in any type and follow from the formula below, which
tests/unit/calib_import.c has as well."""

import pathlib

import torch

LAYERS, HEADS, DIM = 2, 2, 64


def rotation(seed: int) -> torch.Tensor:
    result = torch.zeros(DIM, DIM)
    for row in range(DIM):
        column = (row * (2 * seed + 5) + seed) % DIM
        result[row, column] = -1.0 if (row * 7 + seed) % 3 == 0 else 1.0
    return result


def main() -> None:
    here = pathlib.Path(__file__).parent
    k = {
        "format_version": 1,
        "objective": "qqt_r_h_pbr",
        "source_grouping": "layer",
        "layers": {
            layer: {
                "layer_id": layer,
                "rotation": rotation(layer).to(torch.bfloat16),
                "eigenvalues": torch.arange(DIM, 0, -1, dtype=torch.float32),
            }
            for layer in range(LAYERS)
        },
    }
    # Views into one storage, with their columns contiguous.
    heads = torch.stack([torch.stack([rotation(10 + 2 * layer + head) for head in range(HEADS)]) for layer in range(LAYERS)])
    columns = heads.transpose(-1, -2).to(torch.float16).contiguous().transpose(-1, -2)
    v = {
        "format_version": 2,
        "objective": "sst_r_h_pbr",
        "source_grouping": "per_kv_head",
        "layers": {layer: {"layer_id": layer, "rotation": columns[layer]} for layer in range(LAYERS)},
    }
    torch.save(k, here / "k_rotation_qqt_r_h_pbr.pt")
    torch.save(v, here / "v_rotation_sst_r_h_pbr.pt")


if __name__ == "__main__":
    main()
