"""A pool of cache blocks with reference counts, and the tables of requests that hold them."""

from __future__ import annotations

from collections import Counter, deque

from .config import PoolAction, PoolAnswer


class BlockPool:
    """Blocks 1 to n - 1 (0 is nobody's), handed out in the order in which they became free."""

    def __init__(self, blocks: int) -> None:
        """All blocks but the null block are free.

        Raises:
            ValueError: there are fewer than two blocks.
        """
        if blocks < 2:
            raise ValueError(f"blocks: expected at least 2, the null block and another, got {blocks}")
        self.blocks = blocks
        self.free = deque(range(1, blocks))
        self.held: dict[int, int] = {}  # how often a block is referred to

    def allocate(self, count: int) -> list[int] | None:
        """That many blocks, referred to once, or None while fewer are free.

        Raises:
            ValueError: the pool has not so many blocks at all.
        """
        if count >= self.blocks:
            raise ValueError(f"count: expected fewer than the pool's {self.blocks} blocks, got {count}")
        if count > len(self.free):
            return None
        taken = [self.free.popleft() for _ in range(count)]
        self.held |= dict.fromkeys(taken, 1)
        return taken

    def pin(self, block: int) -> None:
        """Refer to a held block once more.

        Raises:
            ValueError: nobody holds it.
        """
        self._expect_held(block)
        self.held[block] += 1

    def unpin(self, block: int) -> None:
        """Refer to a block once less; the last reference frees it.

        Raises:
            ValueError: nobody holds it: a double free.
        """
        self._expect_held(block)
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]
            self.free.append(block)

    def _expect_held(self, block: int) -> None:
        if block not in self.held:
            raise ValueError(f"block: expected one that is held, got {block}")


class BlockTables:
    """Tables of blocks, each with the number of tokens in it; every change is whole or refused."""

    def __init__(self, tables: int, *, pool: BlockPool, block: int) -> None:
        """Empty tables over a pool of blocks of `block` tokens."""
        self.pool, self.block = pool, block
        self.rows: list[list[int]] = [[] for _ in range(tables)]
        self.tokens = [0] * tables
        self.pins: Counter[int] = Counter()  # references that belong to no table

    def grow(self, table: int, tokens: int) -> bool:
        """Room for more tokens, or False while there is none."""
        more = self._blocks(self.tokens[table] + tokens) - len(self.rows[table])
        taken = self.pool.allocate(more)
        if taken is None:
            return False
        self.rows[table] += taken
        self.tokens[table] += tokens
        return True

    def shrink(self, table: int, tokens: int) -> None:
        """Fewer tokens; blocks that hold none any more go back, the last one first.

        Raises:
            ValueError: the table holds fewer, or a block that another table holds too would be written to again.
        """
        if tokens > self.tokens[table]:
            raise ValueError(f"tokens: expected at most {self.tokens[table]}, got {tokens}")
        left = self.tokens[table] - tokens
        if left % self.block:
            last = self.rows[table][left // self.block]
            if self.pool.held[last] - self.pins[last] > 1:
                raise ValueError(
                    f"tokens: expected to leave shared block {last} full, got {left % self.block} tokens left in it"
                )
        self.tokens[table] = left
        while len(self.rows[table]) > self._blocks(self.tokens[table]):
            self.pool.unpin(self.rows[table].pop())

    def fork(self, table: int, into: int) -> tuple[int, int] | None:
        """Share a table's full blocks with an empty one and give it a copy of the last, unless that is full too.

        Returns the block to copy and the block to copy it to, (0, 0) if there is none, or None while none is free.

        Raises:
            ValueError: the other table is not empty.
        """
        if self.rows[into]:
            raise ValueError(f"into: expected an empty table, got {self.rows[into]}")
        full = self.tokens[table] // self.block
        partial = self.rows[table][full:]
        own = self.pool.allocate(len(partial))
        if own is None:
            return None
        for block in self.rows[table][:full]:
            self.pool.pin(block)
        self.rows[into] = self.rows[table][:full] + own
        self.tokens[into] = self.tokens[table]
        return (partial[0], own[0]) if partial else (0, 0)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def run(self, action: PoolAction, first: int, second: int) -> tuple[int, int, int]:
        """One line of a script: what became of it, and for a fork the block to copy and its copy.

        Raises:
            ValueError: the line can never be done.
        """
        copy: tuple[int, int] | None = (0, 0)
        if action is PoolAction.GROW and not self.grow(first, second):
            copy = None
        elif action is PoolAction.FREE:
            self.shrink(first, self.tokens[first])
        elif action is PoolAction.FORK:
            copy = self.fork(first, second)
        elif action is PoolAction.SHRINK:
            self.shrink(first, second)
        elif action is PoolAction.PIN:
            self.pool.pin(first)
            self.pins[first] += 1
        elif action is PoolAction.UNPIN:
            if not self.pins[first]:
                raise ValueError(f"block: expected one that is pinned, got {first}")
            self.pool.unpin(first)
            self.pins[first] -= 1
        return (PoolAnswer.WAITS, 0, 0) if copy is None else (PoolAnswer.DONE, *copy)
