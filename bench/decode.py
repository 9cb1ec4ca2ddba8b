"""decode: one query per sequence over a long cache of keys, which is reading memory and little else."""

from __future__ import annotations

from .measuring import Session, Settings
from .peers import chosen
from .work import Case

# (batch, heads, heads of k, keys): from one long chat to many short ones.
GPU_CACHES = ((32, 64, 8, 8192), (1, 64, 8, 131072), (128, 32, 8, 2048), (8, 32, 32, 8192), (1, 32, 8, 4096))
CPU_CACHES = ((1, 32, 8, 8192), (4, 32, 8, 4096), (1, 8, 8, 8192), (8, 32, 8, 1024))


def run(settings: Settings) -> None:
    session = Session("decode", settings)
    place = session.place
    caches = CPU_CACHES if place.name == "cpu" else GPU_CACHES
    suite = [
        Case(batch, heads, 1, 128, place.dtypes[0], heads_k=heads_k, seqlen_k=keys)
        for batch, heads, heads_k, keys in (caches[:2] if settings.quick else caches)
    ]
    peers = chosen(place, settings.peers)
    for case in session.cases(suite):
        for row in session.measure(case, peers):
            share = float(row["gb_per_s"]) * 1e9 / session.ceilings.bytes_per_second
            session.say(f"  {row['implementation']:24} {row['gb_per_s']:>8} GB/s, {share:.2f} of a copy")
