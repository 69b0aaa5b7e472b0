"""Keys of blocks by another way: SHA-256 from its definition, on one long message after the other."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from deeptwin.reference.config import PrefixConfig


def _primes(count: int) -> list[int]:
    found: list[int] = []
    n = 2
    while len(found) < count:
        if all(n % p for p in found):
            found.append(n)
        n += 1
    return found


def _fraction(prime: int, root: int) -> int:
    """The first 32 bits behind the point of a square or cube root, by integers."""
    scaled = prime << (32 * root)
    low = math.isqrt(scaled) if root == 2 else _cube_root(scaled)
    return low & 0xFFFFFFFF


def _cube_root(n: int) -> int:
    low, high = 0, 1 << ((n.bit_length() + 2) // 3 + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**3 <= n else (low, middle - 1)
    return low


START = [_fraction(p, 2) for p in _primes(8)]
ROUNDS = [_fraction(p, 3) for p in _primes(64)]


def _turn(x: int, by: int) -> int:
    return (x >> by | x << (32 - by)) & 0xFFFFFFFF


def sha256(message: bytes) -> bytes:
    """FIPS 180-4, section 6.2."""
    padded = message + b"\x80" + bytes((55 - len(message)) % 64) + (8 * len(message)).to_bytes(8, "big")
    state = list(START)
    for block in np.frombuffer(padded, dtype=">u4").reshape(-1, 16).tolist():
        words = list(block)
        for t in range(16, 64):
            a, b = words[t - 15], words[t - 2]
            small = _turn(a, 7) ^ _turn(a, 18) ^ a >> 3
            large = _turn(b, 17) ^ _turn(b, 19) ^ b >> 10
            words.append((words[t - 16] + small + words[t - 7] + large) & 0xFFFFFFFF)
        a, b, c, d, e, f, g, h = state
        for constant, word in zip(ROUNDS, words, strict=True):
            one = h + (_turn(e, 6) ^ _turn(e, 11) ^ _turn(e, 25)) + (e & f ^ ~e & g) + constant + word
            two = (_turn(a, 2) ^ _turn(a, 13) ^ _turn(a, 22)) + (a & b ^ a & c ^ b & c)
            a, b, c, d, e, f, g, h = (one + two) & 0xFFFFFFFF, a, b, c, (d + one) & 0xFFFFFFFF, e, f, g
        state = [(x + y) & 0xFFFFFFFF for x, y in zip(state, (a, b, c, d, e, f, g, h), strict=True)]
    return b"".join(x.to_bytes(4, "big") for x in state)


def keys_of_one_message(tokens_bt: Tensor, length_b: Tensor, *, config: PrefixConfig) -> Tensor:
    """Every key by itself: the chain up to it is walked again from the root."""
    keys = np.zeros((len(tokens_bt), tokens_bt.shape[1] // config.block, 32), dtype=np.uint8)
    names = [name.encode("utf-8") for name in (config.model, config.salt)]
    root = b"deeptwin.prefix.1\x00" + b"".join(np.uint32(len(n)).astype("<u4").tobytes() + n for n in names)
    start = sha256(root + np.uint32(config.block).astype("<u4").tobytes())
    for b, i in np.ndindex(keys.shape[:2]):
        if (i + 1) * config.block > int(length_b[b]):
            continue
        key = start
        for block in tokens_bt[b, : (i + 1) * config.block].numpy().astype("<i4").reshape(i + 1, config.block):
            key = sha256(key + block.tobytes())
        keys[b, i] = np.frombuffer(key, dtype=np.uint8)
    return torch.from_numpy(keys)
