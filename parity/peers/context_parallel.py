"""The split row by row: which rank a row falls to and where it stands, as a peer of `reference/context_parallel.py`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def split_by_row(query_b: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
    """Every row asks for its own rank and place; what no row takes is padding."""
    length = sum(_width(rows, ranks) for rows in query_b.tolist())
    gather = np.full((ranks, length), -1, dtype=np.int64)
    inverse = []
    for row, (rank, place) in enumerate(_places(query_b.tolist(), ranks)):
        gather[rank, place] = row
        inverse.append(rank * length + place)
    return torch.from_numpy(gather), torch.tensor(inverse, dtype=torch.int64)


def keys_by_row(query_b: Tensor, key_b: Tensor, *, ranks: int, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row sees the whole groups that end at or before it; keys are numbered by walking the sequences."""
    queries, keys = query_b.tolist(), key_b.tolist()
    length = sum(_width(rows, ranks) for rows in queries)
    position, first, end = (np.zeros((ranks, length), dtype=np.int64) for _ in range(3))
    starts, number = [], 0
    for tokens in keys:
        starts.append(number)
        number += max(1, sum((p + 1) % ratio == 0 for p in range(tokens)))
    begin = 0
    for sequence, rows in enumerate(queries):
        first[:, begin : begin + _width(rows, ranks)] = starts[sequence]
        begin += _width(rows, ranks)
    end[:] = first
    places = iter(_places(queries, ranks))
    for sequence, rows in enumerate(queries):
        for row in range(rows):
            rank, place = next(places)
            at = keys[sequence] - rows + row
            position[rank, place] = at
            end[rank, place] += sum((p + 1) % ratio == 0 for p in range(at + 1))
    return torch.from_numpy(position), torch.from_numpy(first), torch.from_numpy(end)


def exchange_by_row(query_b: Tensor, kept_b: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
    """Kept rows queue up on their rank by place."""
    places = _places(query_b.tolist(), ranks)
    kept: list[int] = []
    row = 0
    for rows, last in zip(query_b.tolist(), kept_b.tolist(), strict=True):
        kept += range(row + rows - last, row + rows)
        row += rows
    queues = [sorted(places[i][1] for i in kept if places[i][0] == rank) for rank in range(ranks)]
    longest = max(map(len, queues))
    sent = torch.tensor([queue + [-1] * (longest - len(queue)) for queue in queues], dtype=torch.int64)
    arrival = [places[i][0] * longest + queues[places[i][0]].index(places[i][1]) for i in kept]
    return sent.reshape(ranks, longest), torch.tensor(arrival, dtype=torch.int64)


def index_with_zero_row(x_tm: Tensor, index_i: Tensor) -> Tensor:
    """A zero row behind the others is what -1 means to numpy; bf16."""
    padded = np.concatenate([x_tm.view(torch.int16).numpy(), np.zeros((1, x_tm.shape[1]), np.int16)])
    return torch.from_numpy(padded[index_i.numpy()]).view(torch.bfloat16)


def _width(rows: int, ranks: int) -> int:
    return 2 * (-(-rows // (2 * ranks)))


def _places(queries: list[int], ranks: int) -> list[tuple[int, int]]:
    """Rank and local place of every row of the packed batch."""
    found, begin = [], 0
    for rows in queries:
        size = _width(rows, ranks) // 2
        for row in range(rows):
            block, within = divmod(row, size)
            late = block >= ranks
            found.append((2 * ranks - 1 - block if late else block, begin + within + (size if late else 0)))
        begin += 2 * size
    return found
