"""The host's side of the rollout engine: who gets which slot and which pages, between two dispatches. None of it can be seen in the bits.

A prompt waits in a queue, is prefilled chunk by chunk, and is ready; its samples then wait for slots. A row decodes until it stops; an
environment may answer, whose text is prefilled into the row's own pages, and it decodes on. Pages are promised before they are needed, so
that what has started can always end.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from concurrent import futures

import jax
import numpy as np

from rl_adapter import cache, engine
from rl_adapter import mesh as meshes

ANSWERS = 16  # of environments that are sought at a time

# (prompt, sample, tokens so far) -> tokens that an environment adds, after which the policy goes on; None ends the completion. Called for
# several completions at a time, from as many threads.
Respond = Callable[[int, int, np.ndarray], Sequence[int] | None]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished completion, on the host; n tokens, of which the last was not fed back."""

    prompt: int  # row of the batch
    sample: int
    tokens: np.ndarray  # [n] int32
    drawn: np.ndarray  # [n] bool: by the policy; else an environment's
    logprobs: np.ndarray  # [n, 3] f32: sampled, tempered, scored; 0 where not drawn
    choices: np.ndarray  # [n - 1, Ls, k] int16
    stopped: bool  # by a stop token
    prompt_choices: np.ndarray  # [T, Ls, k] int16


@dataclasses.dataclass(eq=False)
class _Context:
    """Pages of a context, and text that is still to be prefilled into it."""

    shard: int
    first: int  # position of its first token
    length: int = 0  # tokens that its pages hold
    pages: list[int] = dataclasses.field(default_factory=list)
    text: np.ndarray | None = None
    choices: list[np.ndarray] = dataclasses.field(default_factory=list)  # of its tokens, [n, Ls, k] each


@dataclasses.dataclass(eq=False)
class _Prompt:
    index: int
    id: int
    context: _Context
    waiting: collections.deque  # samples that have no slot yet
    unfinished: int
    first: tuple[np.ndarray, np.ndarray] | None = None  # first token of each sample [G], and its logprobs [G, 3]


@dataclasses.dataclass(eq=False)
class _Row:
    """A completion at work, in a slot."""

    prompt: _Prompt
    sample: int
    at: tuple[int, int]  # tile, lane
    context: _Context  # its own, after the prompt's
    limit: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    drawn: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)


class Scheduler:
    """Slots, pages and queues of one batch."""

    def __init__(self, model, sampling, lay, base, adapter, prompts, ids, seed, limits, respond, counts):
        self.model, self.sampling, self.lay, self.base, self.adapter = model, sampling, lay, base, adapter
        self.seed, self.limits, self.respond, self.counts = np.int32(seed), limits, respond, counts
        self.pool = cache.zeros(engine.cache_like(model, lay), model.mesh)
        self.queue = collections.deque(
            _Prompt(i, int(id_), _Context(-1, 0, text=text), collections.deque(range(sampling.group)), sampling.group)
            for i, (text, id_) in enumerate(zip(prompts, ids, strict=True))
        )
        self.free = [list(range(lay.pages - 1, cache.TRASH, -1)) for _ in range(lay.shards)]  # pages of each shard
        self.promised = [0] * lay.shards  # pages that contexts at work may still ask for
        self.held = [0] * lay.shards  # pages that prompts hold
        self.prefilling: list[_Prompt | _Row] = []
        self.ready: list[list[_Prompt]] = [[] for _ in range(lay.shards)]  # prefilled prompts with samples waiting
        self.rows: list[list[_Row | None]] = [[None] * lay.lanes for _ in range(lay.tiles)]
        self.owner: list[_Prompt | None] = [None] * lay.tiles
        cells = lay.tiles, lay.lanes
        self.live = np.zeros(cells, bool)
        self.now = {name: np.zeros(cells, np.int32) for name in ("token", "drawn", "limit", "ids", "samples")}
        self.of_prompts, self.own = cache.empty_table(lay.tiles, lay.prompt_pages), cache.empty_table(*cells, lay.own_pages)
        self.done: list[Completion] = []
        self.spoken: list[_Row] = []  # rows that wait for their environment

    # --- what one pass of the loop does

    def admit(self) -> None:
        """Prefill what waits for it, and give free slots to samples of prompts that are ready."""
        while True:
            for tile in range(self.lay.tiles):
                for lane in range(self.lay.lanes):
                    while self.rows[tile][lane] is None and self._start(tile, lane):
                        pass
            freed = self._answer_all()
            self._begin_prompts()
            if self.prefilling:
                self._prefill()
            elif not freed:
                return

    def dispatch(self):
        """Start decoding, and return what will come; None where no slot is at work."""
        lay = self.lay
        if not self.live.any():
            return None
        for tile, lane in np.argwhere(self.live):
            row = self.rows[tile][lane]
            self._extend(row.context, min(lay.steps, row.limit - len(row.tokens)))
            _show(self.own, (tile, lane), row.context)
        waiting = len(self.queue) + sum(len(p.waiting) for shard in self.ready for p in shard)
        # A slot that waits costs as much as one at work; a dispatch that ends for each costs the host's time.
        enough = max(1, min(waiting, self.live.size // 16)) if waiting else self.live.size + 1
        rows = self._placed(self.now | {"live": self.live})
        tables = self._placed((self.of_prompts, self.own))
        self.pool, out = engine.decode(
            self.model, self.sampling, lay.steps, self.base, self.adapter, self.pool, rows, *tables, np.int32(enough), self.seed
        )
        return out

    def collect(self, out) -> None:
        """Take over what a dispatch gave; completions that have ended go to `done`."""
        out = jax.device_get(out)
        steps = int(out["steps"])
        self.counts.update({"dispatches": 1, "slot_steps": steps * self.live.size, "decoded": int(out["live"][:steps].sum())})
        for tile, lane in np.argwhere(self.live):
            row, n = self.rows[tile][lane], int(out["live"][:steps, tile, lane].sum())
            tokens = out["tokens"][:n, tile, lane]
            row.tokens += tokens.tolist()
            row.drawn += [True] * n
            row.logprobs.append(out["logprobs"][:n, tile, lane])
            row.context.choices.append(out["choices"][:n, :, tile, lane])
            row.context.length += n
            self.now["drawn"][tile, lane] += n
            self.now["token"][tile, lane] = tokens[-1]
            if self._ended(row):
                self._end_turn(row)
        self._answer_all()

    # --- prompts and text

    def _begin_prompts(self) -> None:
        """Queue prompts for prefill where slots are free: as many as are prefilled at a time, and as pages allow."""
        lay = self.lay
        per_shard = lay.tiles // lay.shards
        for shard in range(lay.shards):
            tiles = range(shard * per_shard, (shard + 1) * per_shard)
            free = sum(row is None for t in tiles if self.owner[t] is None or lay.lanes == 1 for row in self.rows[t])
            coming = [job for job in self.prefilling if job.context.shard == shard]
            wanted = lay.prefill // lay.shards - len(coming) - len(self.ready[shard]) if free else 0
            while self.queue and wanted > 0:
                prompt = self.queue[0]
                pages = -(-len(prompt.context.text) // lay.page)
                # Were all rows to end, one must still find room beside the prompts: else nothing could ever go on.
                if self.held[shard] + pages + lay.own_pages >= lay.pages or pages > len(self.free[shard]) - self.promised[shard]:
                    break
                self.queue.popleft()
                prompt.context.shard = shard
                self.held[shard] += pages
                self.promised[shard] += pages
                self.prefilling.append(prompt)
                wanted -= 1

    def _prefill(self) -> None:
        """One dispatch: the next chunk of as many texts as fit."""
        lay, sampling = self.lay, self.sampling
        some = lay.prefill // lay.shards
        long = lay.prompt_pages if self.respond or lay.chunk < lay.prompt_pages * lay.page else 0
        before = cache.empty_table(lay.prefill, long), cache.empty_table(lay.prefill, lay.own_pages if self.respond else 0)
        chunk = {name: np.zeros(lay.prefill, np.int32) for name in ("lengths", "start", "ids")}
        chunk |= {name: np.zeros((lay.prefill, sampling.group), np.int32) for name in ("samples", "drawn")}
        chunk |= {name: np.zeros((lay.prefill, lay.chunk), np.int32) for name in ("tokens", "page", "slot")}
        taken, room, place = [], [lay.budget] * lay.shards, [shard * some for shard in range(lay.shards)]
        for job in self.prefilling:
            context, shard = job.context, job.context.shard
            text = context.text[: lay.chunk]
            if place[shard] == (shard + 1) * some or len(text) > room[shard]:
                continue
            at, n = place[shard], len(text)
            place[shard], room[shard] = at + 1, room[shard] - n
            prompt = job if isinstance(job, _Prompt) else job.prompt
            for table, known in zip(before, (prompt.context, context)):
                if known.length and (table is before[0] or context is not prompt.context):
                    _show(table, at, known)
            self._extend(context, n)
            index = context.length + np.arange(n)
            chunk["tokens"][at, :n] = text
            chunk["page"][at, :n], chunk["slot"][at, :n] = np.array(context.pages)[index // lay.page], index % lay.page
            chunk["lengths"][at], chunk["start"][at], chunk["ids"][at] = n, context.first + context.length, prompt.id
            chunk["samples"][at], chunk["drawn"][at] = (np.arange(sampling.group), 0) if job is prompt else (job.sample, len(job.tokens))
            taken.append((job, at, n))
        self.pool, out = engine.prefill(
            self.model, sampling, lay.budget, self.base, self.adapter, self.pool, *self._placed((chunk, before)), self.seed
        )
        self.counts.update({"prefills": 1, "prefill_room": lay.budget * lay.shards, "prefilled": sum(n for *_, n in taken)})
        out = jax.device_get(out)
        for job, at, n in taken:
            context = job.context
            context.choices.append(np.moveaxis(out["choices"][:, at, :n], 0, 1))
            context.length, context.text = context.length + n, context.text[n:]
            if len(context.text):
                continue
            self.prefilling.remove(job)
            if isinstance(job, _Prompt):
                job.first = out["tokens"][at], out["logprobs"][at]
                self.ready[context.shard].append(job)
            else:
                self._draw(job, out["tokens"][at, 0], out["logprobs"][at, 0])

    # --- completions

    def _start(self, tile: int, lane: int) -> bool:
        """Put a waiting sample into a free slot. True where one was; it may have ended already."""
        lay, prompt = self.lay, self.owner[tile]
        shard = tile // (lay.tiles // lay.shards)
        if prompt is None:
            prompt = next(iter(self.ready[shard]), None)
        if prompt is None or not prompt.waiting or lay.own_pages > len(self.free[shard]) - self.promised[shard]:
            return False
        self.promised[shard] += lay.own_pages
        sample = prompt.waiting.popleft()
        row = _Row(prompt, sample, (tile, lane), _Context(shard, prompt.context.length), int(self.limits[prompt.index, sample]))
        if not prompt.waiting:
            self.ready[shard].remove(prompt)
        self.rows[tile][lane], self.owner[tile] = row, prompt
        _show(self.of_prompts, tile, prompt.context)
        self._draw(row, prompt.first[0][sample], prompt.first[1][sample])
        return True

    def _draw(self, row: _Row, token: int, logprobs: np.ndarray) -> None:
        """A token that prefill drew: the row decodes on from it."""
        row.tokens.append(int(token))
        row.drawn.append(True)
        row.logprobs.append(logprobs[None])
        now = {"token": token, "drawn": len(row.tokens), "limit": row.limit, "ids": row.prompt.id, "samples": row.sample}
        for name, value in now.items():
            self.now[name][row.at] = value
        self.live[row.at] = True
        if self._ended(row):
            self._end_turn(row)

    def _ended(self, row: _Row) -> bool:
        return row.tokens[-1] in self.sampling.stop_ids or len(row.tokens) >= row.limit

    def _end_turn(self, row: _Row) -> None:
        """The policy has stopped: an environment may answer, or the completion is done."""
        self.live[row.at] = False
        if self.respond:
            self.spoken.append(row)
        else:
            self._finish(row)

    def _answer_all(self) -> bool:
        """Go on with all rows that wait for an answer; several are sought at a time, since a tool may take long. True: there were some."""
        spoken, self.spoken = self.spoken, []
        if not spoken:
            return False
        with futures.ThreadPoolExecutor(min(len(spoken), ANSWERS)) as threads:
            answers = list(threads.map(self._answer, spoken))
        for row, more in zip(spoken, answers):
            self._go_on(row, more)
        return True

    def _go_on(self, row: _Row, more: np.ndarray) -> None:
        """A row with what an environment adds to it."""
        if not len(more) or len(row.tokens) + len(more) >= row.limit:
            return self._finish(row)
        row.context.text = np.array([row.tokens[-1], *more], np.int32)  # the last token was drawn, not fed
        row.tokens += map(int, more)
        row.drawn += [False] * len(more)
        row.logprobs.append(np.zeros((len(more), 3), np.float32))
        self.prefilling.append(row)

    def _answer(self, row: _Row) -> np.ndarray:
        """What the environment adds; it is not trusted to be tokens."""
        more = self.respond(row.prompt.index, row.sample, np.array(row.tokens, np.int32))
        more = np.zeros(0, np.int32) if more is None or np.size(more) == 0 else np.asarray(more)
        if more.ndim != 1 or more.dtype.kind not in "iu" or (more.size and not 0 <= more.min() <= more.max() < self.model.spec.vocab):
            where = f"after sample {row.sample} of prompt {row.prompt.index}"
            raise ValueError(f"respond: found {str(more)[:60]} {where}, need token ids in 0 .. {self.model.spec.vocab - 1}, or None")
        return more

    def _finish(self, row: _Row) -> None:
        tile, lane = row.at
        prompt, shard = row.prompt, row.context.shard
        self.promised[shard] -= self.lay.own_pages - len(row.context.pages)
        self.free[shard] += row.context.pages
        self.rows[tile][lane] = None
        if all(other is None for other in self.rows[tile]):
            self.owner[tile] = None
            self.of_prompts.length[tile] = 0
        prompt.unfinished -= 1
        if not prompt.unfinished:
            self.free[shard] += prompt.context.pages
            self.held[shard] -= len(prompt.context.pages)
        none = np.zeros((0, self.model.spec.sparse_layers, self.model.spec.experts_per_token), np.int16)
        self.done.append(
            Completion(
                prompt.index, row.sample, np.array(row.tokens, np.int32), np.array(row.drawn), np.concatenate(row.logprobs),
                np.concatenate([none, *row.context.choices]), row.tokens[-1] in self.sampling.stop_ids,
                np.concatenate(prompt.context.choices),
            )
        )  # fmt: skip

    # --- pages and devices

    def _extend(self, context: _Context, n: int) -> None:
        """Pages for `n` more tokens, of those that the context was promised."""
        while len(context.pages) * self.lay.page < context.length + n:
            context.pages.append(self.free[context.shard].pop())
            self.promised[context.shard] -= 1

    def _placed(self, tree):
        """Rows in front: to the devices that work on them."""
        return tree if self.model.mesh is None else jax.device_put(tree, meshes.rows(self.model.mesh))


def _show(table: cache.Table, at, context: _Context) -> None:
    """Enter a context into a table."""
    table.page[at][: len(context.pages)] = context.pages
    table.length[at], table.first[at] = context.length, context.first
