"""A tiny kvmanager as a plain object. It asserts every rule that a scheduler must keep."""

from dataclasses import dataclass

from quire.v1 import executor_pb2, kvmanager_pb2
from tests.unit.scheduler.sim_executor import SimExecutor


@dataclass
class Held:
    executor_id: str
    namespace: str
    blocks: list[int]
    tokens: list[int]
    sealed: int  # blocks known to be ready


class SimKv:
    """Blocks with reference counts and a prefix cache over ready blocks. Asserts what schedulers owe it."""

    def __init__(self) -> None:
        self.used_ids: set[int] = set()
        self.restart()

    def restart(self) -> None:
        self.size: dict[str, int] = {}
        self.references: dict[str, list[int]] = {}
        self.cache: dict[str, dict[tuple[object, ...], int]] = {}
        self.epochs: dict[str, int] = {}
        self.fingerprints: dict[str, str] = {}
        self.held: dict[int, Held] = {}
        self.lost: set[int] = set()  # stated as held when their epoch was over
        self.refusals = 0

    def register(self, executor: SimExecutor) -> None:
        name = executor.description.executor_id
        self.epochs[name] = executor.epoch
        self.fingerprints[name] = executor.description.model.fingerprint
        if name not in self.size:
            self.size[name] = executor.block_size
            self.references[name] = [0] * len(executor.slots)
            self.cache[name] = {}

    def available(self, name: str) -> int:
        return self.references[name].count(0)

    def take_pushes(self) -> list[kvmanager_pb2.ReserveResponse]:
        """It never speaks unasked."""
        return []

    def stand_still(self) -> None:
        """Nobody waits here."""

    def report(self, executor: SimExecutor) -> None:
        raise AssertionError("it moves no blocks")

    def reopen(self) -> None:
        """A new stream: what is held is stated anew."""
        for held in self.held.values():
            for block in held.blocks:
                self.references[held.executor_id][block] -= 1
        self.held.clear()
        self.lost.clear()

    def assert_idle(self, sims: list[SimExecutor]) -> None:
        assert not self.held
        for sim in sims:
            assert self.available(sim.description.executor_id) == len(sim.slots)

    def handle(self, request: kvmanager_pb2.ReserveRequest) -> kvmanager_pb2.ReserveResponse:
        response = kvmanager_pb2.ReserveResponse()
        for stated in request.held:
            if self.epochs[stated.executor_id] == stated.epoch:
                self._restate(stated)
            else:
                self.lost.add(stated.sequence_id)
                response.lost_sequence_ids.append(stated.sequence_id)
        for stay in self.lost.intersection(request.released_sequence_ids):
            self.lost.remove(stay)
            request.released_sequence_ids.remove(stay)
        for stay in request.released_sequence_ids:
            held = self.held.pop(stay)  # KeyError: released twice, or never reserved
            for block in held.blocks:
                self.references[held.executor_id][block] -= 1
        for progress in request.progress:
            if progress.sequence_id not in self.lost:
                self._progress(progress)
        for stay, slots in zip(request.extend_sequence_ids, request.extend_token_counts, strict=True):
            if stay not in self.lost:
                response.extensions.append(self._extend(stay, slots))
        for reservation in request.reservations:
            loads = list(zip(request.loads.executor_ids, request.loads.epochs, strict=True))
            allowed = [loads[i] for i in reservation.load_indexes] or loads
            response.reservations.append(self._reserve(reservation, allowed))
        for name, references in self.references.items():
            response.space.append(
                kvmanager_pb2.ExecutorSpace(
                    executor_id=name, available_block_count=self.available(name), total_block_count=len(references)
                )
            )
        return response

    def _restate(self, stated: kvmanager_pb2.HeldSequence) -> None:
        name, stay = stated.executor_id, stated.sequence_id
        assert stay not in self.held
        assert self.fingerprints[name] == stated.model_fingerprint
        (blocks,) = (list(group.block_ids) for group in stated.blocks)
        tokens, size = list(stated.token_ids), self.size[name]
        assert stated.computed_length <= min(len(tokens), len(blocks) * size)
        for other in self.held.values():
            if other.executor_id == name:
                for position, block in enumerate(blocks):
                    if block in other.blocks:  # a common prefix, whole and computed
                        end = (position + 1) * size
                        assert other.blocks.index(block) == position
                        assert end <= stated.computed_length
                        assert other.tokens[:end] == tokens[:end]
        for block in blocks:
            self.references[name][block] += 1
        self.used_ids.add(stay)
        held = self.held[stay] = Held(name, stated.namespace, blocks, tokens, 0)
        self._seal(held, stated.computed_length)

    def _progress(self, progress: kvmanager_pb2.SequenceProgress) -> None:
        held = self.held[progress.sequence_id]
        held.tokens += progress.token_ids
        size = self.size[held.executor_id]
        assert progress.computed_length <= min(len(held.tokens), len(held.blocks) * size)
        self._seal(held, progress.computed_length)

    def _seal(self, held: Held, computed: int) -> None:
        size = self.size[held.executor_id]
        while (held.sealed + 1) * size <= computed:
            key = (self.fingerprints[held.executor_id], held.namespace, *held.tokens[: (held.sealed + 1) * size])
            self.cache[held.executor_id].setdefault(key, held.blocks[held.sealed])
            held.sealed += 1

    def _extend(self, stay: int, slots: int) -> kvmanager_pb2.ExtendResult:
        held = self.held[stay]
        count = -(-slots // self.size[held.executor_id]) - len(held.blocks)
        assert count > 0
        if len(held.blocks) + count > len(self.references[held.executor_id]):
            return kvmanager_pb2.ExtendResult(sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NEVER_FITS)
        if count > self.available(held.executor_id):
            self.refusals += 1
            return kvmanager_pb2.ExtendResult(sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NO_BLOCKS)
        blocks = self._allocate(held.executor_id, count)
        held.blocks += blocks
        return kvmanager_pb2.ExtendResult(
            sequence_id=stay,
            outcome=kvmanager_pb2.RESERVATION_OUTCOME_GRANTED,
            blocks=[executor_pb2.BlockList(group_id=0, block_ids=blocks)],
        )

    def _allocate(self, name: str, count: int) -> list[int]:
        cached = set(self.cache[name].values())
        free = sorted((b for b, n in enumerate(self.references[name]) if n == 0), key=lambda b: (b in cached, b))
        blocks = free[:count]
        assert len(blocks) == count
        self.cache[name] = {k: b for k, b in self.cache[name].items() if b not in blocks}
        for block in blocks:
            self.references[name][block] += 1
        return blocks

    def _reserve(
        self, wanted: kvmanager_pb2.Reservation, allowed: list[tuple[str, int]]
    ) -> kvmanager_pb2.ReservationResult:
        stay = wanted.sequence_id
        assert stay not in self.used_ids
        self.used_ids.add(stay)
        known = [
            name
            for name, epoch in allowed
            if self.epochs.get(name) == epoch and self.fingerprints[name] == wanted.model_fingerprint
        ]
        if not known:
            return kvmanager_pb2.ReservationResult(
                sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NO_EXECUTOR
            )
        name = max(known, key=self.available)
        size, tokens = self.size[name], list(wanted.token_ids)
        shared: list[int] = []
        while not wanted.skip_prefix_cache and (len(shared) + 1) * size < len(tokens):
            key = (wanted.model_fingerprint, wanted.namespace, *tokens[: (len(shared) + 1) * size])
            if key not in self.cache[name]:
                break
            shared.append(self.cache[name][key])
        whole = -(-(len(tokens) + wanted.lookahead_tokens) // size)
        if whole > len(self.references[name]):
            return kvmanager_pb2.ReservationResult(
                sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NEVER_FITS
            )
        for block in shared:
            self.references[name][block] += 1
        if whole - len(shared) > self.available(name):
            for block in shared:
                self.references[name][block] -= 1
            self.refusals += 1
            return kvmanager_pb2.ReservationResult(
                sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NO_BLOCKS
            )
        blocks = shared + self._allocate(name, whole - len(shared))
        self.held[stay] = Held(name, wanted.namespace, blocks, tokens, len(shared))
        return kvmanager_pb2.ReservationResult(
            sequence_id=stay,
            outcome=kvmanager_pb2.RESERVATION_OUTCOME_GRANTED,
            executor_id=name,
            blocks=[executor_pb2.BlockList(group_id=0, block_ids=blocks)],
            cached_tokens=len(shared) * size,
        )
