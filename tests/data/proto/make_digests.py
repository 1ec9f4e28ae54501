#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the golden vectors of this folder from the text of proto/digest.h and proto/page.h alone, with Python's hashlib.

    python3 tests/data/proto/make_digests.py > tests/data/proto/digests.txt

A line is `model NAME DIGEST`, `chain NAME DIGEST` or `page HEAD_DIM DIGEST`. proto_digest.c and proto_page.c build the same
inputs and must get the same digests. A vector never changes: what changes an encoding gets a new domain number.
"""
import hashlib
import struct

PAGE_TOKENS = 64


def blake(domain: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=32, key=domain).digest()


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def model_digest(identity: dict) -> bytes:
    geometry = identity["geometry"]
    fields = [
        (1, u32(identity["format"])),
        (2, identity["weights"]),
        (3, identity["revision"].encode()),
        *((4 + i, u32(value)) for i, value in enumerate(geometry)),
        (12, identity["rope"]),
        (13, identity["calibration"]),
        (14, u32(identity["layout"])),
        (15, u32(identity["shard_rank"])),
        (16, u32(identity["shard_size"])),
        (17, identity["adapter"].encode()),
        (18, identity["tenant"].encode()),
    ]
    encoded = b"".join(bytes([number]) + u32(len(value)) + value for number, value in fields)
    return blake(b"oscard model digest 1", encoded)


def chain_digest(parent: bytes, tokens: list[int]) -> bytes:
    assert len(tokens) == PAGE_TOKENS
    return blake(b"oscard chain digest 1", parent + b"".join(map(u32, tokens)))


def page_record(d: int) -> bytes:
    """A packed record by the layout's text: loops over tiles, lanes, words and bits, the code of (token, dim) in each."""
    words = d // 64

    def code(side: int, token: int, dim: int) -> int:
        return (token * 7 + dim * 13 + (token * dim) // 5 + side) % 4

    record = bytearray()
    for tile in range(4):  # K
        for lane in range(32):
            g, t = divmod(lane, 4)
            for half in range(2):
                for w in range(words):
                    word = 0
                    for k in range(4):
                        for f in range(4):
                            dim = 16 * (words * f + w) + 4 * t + k
                            word |= code(0, 16 * tile + g + 8 * half, dim) << (8 * k + 2 * f)
                    record += u32(word)
    for tile in range(4):  # V
        for lane in range(32):
            g, t = divmod(lane, 4)
            for h in range(2):
                for r in range(words):
                    word = 0
                    for u in range(2):
                        for i in range(8):
                            dim = 8 * (words * i + r) + g
                            word |= code(1, 16 * tile + 8 * h + 2 * t + u, dim) << (16 * u + 2 * i)
                    record += u32(word)
    for tile in range(4):  # scales
        for g in range(8):
            for row in (g, g + 8):
                token = 16 * tile + row
                record += struct.pack("<4H", *(0x1000 * part + token for part in range(4)))
    assert len(record) == 32 * d + 512
    return bytes(record)


def pattern(start: int) -> bytes:
    return bytes((start + 7 * i) % 256 for i in range(32))


def main() -> None:
    qwen = {
        "format": 1,
        "weights": pattern(1),
        "revision": "main",
        "geometry": [36, 32, 8, 128, 1, 64, 64, 256],
        "rope": pattern(2),
        "calibration": pattern(3),
        "layout": 1,
        "shard_rank": 0,
        "shard_size": 1,
        "adapter": "none",
        "tenant": "default",
    }
    shard = dict(qwen, geometry=[80, 16, 2, 256, 2, 64, 64, 256], shard_rank=3, shard_size=4, revision="awq-4bit",
                 adapter="sql-lora", tenant="équipe-7")
    print("model qwen", model_digest(qwen).hex())
    print("model shard", model_digest(shard).hex())
    parent = model_digest(qwen)
    for name, tokens in (
        ("counting", list(range(PAGE_TOKENS))),
        ("large", [0xFFFFFFFF - 3 * i for i in range(PAGE_TOKENS)]),
        ("zeros", [0] * PAGE_TOKENS),
    ):
        parent = chain_digest(parent, tokens)
        print("chain", name, parent.hex())
    for d in (64, 128, 256):
        print("page", d, hashlib.blake2b(page_record(d), digest_size=32).hexdigest())


if __name__ == "__main__":
    main()
