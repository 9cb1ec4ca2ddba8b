"""A stand-in for NCCL: a backend of torch.distributed that is as late, and asks as much, where gloo is not.

NCCL reads and writes on a stream of its own between a call and `wait`, which holds up the caller's stream.
So what arrives is garbage until then here, and whoever writes into memory in between is told. Messages go in
the order of the calls: here each call belongs to that of the other processes which has the same number.
"""

import pickle
import threading

import torch
import torch.distributed as dist

NAME = "nccl_stand_in"
# Those that NCCL sends and torch's tensors have.
_DTYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_GARBAGE = 0xFF  # NaN in every float


class Misuse(Exception):
    """What NCCL would answer with an error, a hang or wrong numbers."""


class _Work(dist.Work):
    """Messages under way, all of one call."""

    def __init__(self, group, number, sends, receives):
        super().__init__()
        self._group, self._number, self._receives = group, number, receives
        self._thread = threading.get_ident()
        self._sent = [(x, _bytes(x).clone()) for _, x in sends]
        for _, x in receives:
            _bytes(x).fill_(_GARBAGE)

    def wait(self, *_):
        """Let everything arrive, which from now on may be touched."""
        if self not in self._group.under_way:
            return True
        self._group.under_way.remove(self)
        if threading.get_ident() != self._thread:
            raise Misuse("the stream of another thread waits")
        for x, before in self._sent:
            if not torch.equal(_bytes(x), before):
                raise Misuse("memory was written while it was sent")
        for _, x in self._receives:
            if not (_bytes(x) == _GARBAGE).all():
                raise Misuse("memory was written while it was received into")
        self._group.arrive(self._number, self._receives)
        return True


class Group(dist.ProcessGroup):
    """Processes that meet in a store; `under_way` are the works that nobody has waited for."""

    def __init__(self, store, rank, ranks, timeout):
        super().__init__(rank, ranks)
        store.set_timeout(timeout)
        self._store, self._calls = store, 0
        self.under_way = []

    def getBackendName(self):
        return NAME

    def allgather(self, outputs, inputs, *_):
        return self._begin(
            "all_gather",
            [(rank, inputs[0]) for rank in range(self.size())],
            [*enumerate(outputs[0])],
        )

    def batch(self, ops):
        """Sends and receives that begin together."""
        peers = [dist.get_group_rank(self, op.peer) for op in ops]
        messages = [(op.op is dist.isend, (peer, op.tensor)) for op, peer in zip(ops, peers, strict=True)]
        return [
            self._begin("batch", [x for out, x in messages if out], [x for out, x in messages if not out])
        ]

    def send(self, *_):
        raise Misuse("a message outside of a batch has a communicator of its own, and holds up others")

    recv = send

    def _begin(self, kind, sends, receives):
        tensors = [x for _, x in (*sends, *receives)]
        if not all(x.is_contiguous() for x in tensors):
            raise Misuse("tensors must be contiguous")
        if len({x.device for x in tensors}) != 1:
            raise Misuse("tensors must be on one device")
        if refused := {x.dtype for x in tensors} - {*_DTYPES}:
            raise Misuse(f"dtype {refused} is not sent")
        self._calls += 1
        told = {
            "kind": kind,
            "sends": [(peer, _kind_of(x), _bytes(x).numpy().tobytes()) for peer, x in sends],
            "receives": [(peer, _kind_of(x)) for peer, x in receives],
        }
        self._store.set(f"{self._calls} of {self.rank()}", pickle.dumps(told))
        work = _Work(self, self._calls, sends, receives)
        self.under_way.append(work)
        return work

    def arrive(self, number, receives):
        """Hand over what the others sent in their call of this number, if it fits to what this one asks."""
        everyone = {rank: pickle.loads(self._store.get(f"{number} of {rank}")) for rank in range(self.size())}
        if len({told["kind"] for told in everyone.values()}) != 1:
            raise Misuse(f"call {number} is not the same everywhere")
        for one, told in everyone.items():
            for other, x in everyone.items():
                sent = [kind for peer, kind, _ in told["sends"] if peer == other]
                received = [kind for peer, kind in x["receives"] if peer == one]
                if sent != received:
                    raise Misuse(f"call {number}: process {one} sends {sent}, {other} receives {received}")
        arriving = {
            rank: iter([x for peer, _, x in told["sends"] if peer == self.rank()])
            for rank, told in everyone.items()
        }
        for source, x in receives:
            arrived = next(arriving[source])
            if arrived:
                _bytes(x).copy_(torch.frombuffer(bytearray(arrived), dtype=torch.uint8))


def _bytes(x):
    return x.detach().reshape(-1).view(torch.uint8)


def _kind_of(x):
    return str(x.dtype), x.numel()


def install(patch):
    """Make the backend known; a batch of messages over one of its groups begins them together."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, Group, devices=["cpu"])
    others = dist.batch_isend_irecv

    def batch(ops):
        group = ops[0].group
        return group.batch(ops) if isinstance(group, Group) else others(ops)

    patch.setattr(dist, "batch_isend_irecv", batch)
    patch.setattr("cupy_flash.torch.ring._HOSTS", ())  # whose tensors are a GPU's then
