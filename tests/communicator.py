"""A communicator as mpi4py's, between threads of one process."""

import queue
import threading

import numpy as np


class Communicator:
    """What mpi4py's offers and the ring uses, between threads of one process."""

    def __init__(self, rank, ranks, boxes):
        self.rank, self.ranks, self.boxes, self.sent, self.gathered = rank, ranks, boxes, 0, 0
        self.under_way, self.refused = [], None

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.ranks

    def Allgather(self, own, everyone):
        self.gathered += own.nbytes * (self.ranks - 1)
        for rank in range(self.ranks):
            self.boxes[self.rank, rank, "all"].put(own.copy())
        for rank in range(self.ranks):
            everyone[rank] = self.boxes[rank, self.rank, "all"].get(timeout=20)

    def Isend(self, array, dest, tag):
        assert array.dtype == np.uint8
        if self.refused == tag:
            raise OSError("no route")
        self.sent += array.nbytes
        sent = array.copy()
        self.boxes[self.rank, dest, tag].put(sent)
        return Request(self.under_way, array, sent)

    def Irecv(self, array, source, tag):
        return Receipt(self.under_way, self.boxes[source, self.rank, tag], array)


class Request:
    """A message, which is under way until it is waited for; nobody may write to its array in between."""

    cancelled = False

    def __init__(self, under_way, array, sent=None):
        for other in under_way:
            if sent is None or other.sent is None:
                assert not np.may_share_memory(array, other.array), "received into an array under way"
        self.under_way, self.array, self.sent = under_way, array, sent
        under_way.append(self)

    def Cancel(self):
        self.cancelled = True

    def Wait(self):
        self.under_way.remove(self)
        assert self.sent is None or (self.array == self.sent).all(), "written before it had been sent"


class Receipt(Request):
    def __init__(self, under_way, box, array):
        super().__init__(under_way, array)
        self.box = box

    def Wait(self):
        super().Wait()
        if not self.cancelled:
            arrived = self.box.get(timeout=20)
            if len(arrived) != len(self.array):
                raise OSError("message truncated")
            self.array[:] = arrived


def in_threads(ranks, function):
    """What a function of a communicator returns in each thread."""
    names = [(a, b, tag) for a in range(ranks) for b in range(ranks) for tag in (*range(7), "all")]
    boxes = {name: queue.SimpleQueue() for name in names}
    results, errors = [None] * ranks, []

    def run(rank):
        try:
            results[rank] = function(Communicator(rank, ranks, boxes))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
