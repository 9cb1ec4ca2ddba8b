"""Mistakes that only the device half of a primitive can have: in the text of PTX, which its twin has not.

They are the subject "device_half" of tests/simulator/mutate.py. Each makes a test that it names fail.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["EDITS", "Edit"]


class Edit(NamedTuple):
    """A change of a header of primitives.

    Attributes
    ----------
    name : str
    file : str
        In kernels_cu/include.
    old, new : str
    tests : str
        For pytest's -k, among `TESTS`.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


TESTS = (
    "tests/simulator/ptx/test_primitives.py", "tests/simulator/ptx/test_kernels.py",
    "tests/simulator/ptx/test_registers.py",
)  # fmt: skip

_WARP = "cuda13-late and (test_warp or test_matrices)"
_COPIES = "test_copies and cuda13-late"
_MMA = "test_mma and cuda13-late"
_WGMMA = "cuda13-late and test_wgmma and (f16 or every_other)"
_BULK = "cuda13-late and test_bulk_copies"
_BOXES = "cuda13-late and test_boxes"
_TURNS = "test_turns and cuda13"
_FORWARD = "sm_90a-cuda13-hopper-f16"
_SASS = "test_warpgroups_take_what_they_need"

EDITS = (
    Edit("descriptors of a and b swapped", "prim/wgmma.cuh",
         '#define CF_SS "l"(a), "l"(b), "r"(add)', '#define CF_SS "l"(b), "l"(a), "r"(add)', _WGMMA),
    Edit("flags of transposed a and b swapped", "prim/wgmma.cuh",
         '"n"(kTransA), "n"(kTransB));', '"n"(kTransB), "n"(kTransA));', _WGMMA),
    Edit("accumulate inverted", "prim/wgmma.cuh", "setp.ne.b32 p", "setp.eq.b32 p", _WGMMA),
    Edit("registers 1 and 2 of a swapped", "prim/wgmma.cuh",
         '"r"(a[0]), "r"(a[1]), "r"(a[2])', '"r"(a[0]), "r"(a[2]), "r"(a[1])', _WGMMA),
    Edit("accumulators 36 and 37 swapped", "prim/wgmma.cuh",
         '#define CF_R40 CF_R36 ",%36,%37', '#define CF_R40 CF_R36 ",%37,%36',
         "cuda13-late and test_wgmma and 256-128"),
    Edit("wgmma_wait one group short", "prim/wgmma.cuh",
         '"wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest)',
         '"wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest + 1)', _WGMMA),
    Edit("accumulator 0 only written", "prim/wgmma.cuh",
         '#define CF_D4 "+f"(d[0])', '#define CF_D4 "=f"(d[0])', _WGMMA),
    Edit("registers of b swapped", "prim/warp.cuh",
         '"r"(a[3]), "r"(b0), "r"(b1))', '"r"(a[3]), "r"(b1), "r"(b0))', _MMA),
    Edit("doubles 1 and 2 of a swapped", "prim/warp.cuh",
         '"d"(a[0]), "d"(a[1]), "d"(a[2])', '"d"(a[0]), "d"(a[2]), "d"(a[1])', _MMA),
    Edit("both doubles of d of m8n8k4 swapped", "prim/warp.cuh",
         '{%0,%1}, {%2}, {%3}, {%0,%1};"', '{%1,%0}, {%2}, {%3}, {%0,%1};"', _MMA),
    Edit("accumulator 2 added twice", "prim/warp.cuh",
         '{%8,%9}, {%0,%1,%2,%3};"', '{%8,%9}, {%0,%1,%2,%2};"', _MMA),
    Edit("scales of a and b swapped", "prim/warp.cuh",
         "%10, {%12,%13}, %11, {%12,%13};", "%11, {%12,%13}, %10, {%12,%13};", _MMA),
    Edit("lanes of scales as bytes", "prim/warp.cuh",
         "%10, {%12,%13}, %11", "%10, {%13,%12}, %11", _MMA),
    Edit("matrices 1 and 2 of ldmatrix swapped", "prim/warp.cuh",
         '".shared.b16 {%0,%1,%2,%3}, [%4];"                 \\\n',
         '".shared.b16 {%0,%2,%1,%3}, [%4];"                 \\\n', _WARP),
    Edit(".trans of stmatrix lost", "prim/warp.cuh",
         'CF_STMATRIX(_trans, ".trans")', 'CF_STMATRIX(_trans, "")', _WARP),
    Edit("order of two e4m3", "prim/warp.cuh", '"=h"(r) : "f"(y), "f"(x)', '"=h"(r) : "f"(x), "f"(y)', _WARP),
    Edit("number of a named barrier", "prim/warp.cuh",
         '"bar.sync %0, %1;" ::"r"(id), "r"(threads)',
         '"bar.sync %0, %1;" ::"r"(threads / 32), "r"(threads)', _FORWARD),
    Edit("setmaxnreg.inc is dec", "prim/warp.cuh", "setmaxnreg.inc.sync", "setmaxnreg.dec.sync", _SASS),
    Edit("setmaxnreg.dec is inc", "prim/warp.cuh", "setmaxnreg.dec.sync", "setmaxnreg.inc.sync", _SASS),
    Edit("cp_async16 without its zeros", "prim/copy.cuh",
         '[%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)',
         '[%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(16)', _COPIES),
    Edit("cp_async_wait one group short", "prim/copy.cuh",
         '"cp.async.wait_group %0;" ::"n"(kNewest)', '"cp.async.wait_group %0;" ::"n"(kNewest + 1)', _COPIES),
    Edit("words 2 and 3 of st_shared swapped", "prim/copy.cuh",
         '"r"(w.x), "r"(w.y), "r"(w.z),\n                     "r"(w.w)',
         '"r"(w.x), "r"(w.y), "r"(w.w),\n                     "r"(w.z)', _TURNS),
    Edit("coordinates 0 and 1 of tma_load swapped", "prim/bulk.cuh",
         'CF_TMA_LOAD("4d", "{%3,%4,%5,%6}", "r"(c0), "r"(c1)',
         'CF_TMA_LOAD("4d", "{%3,%4,%5,%6}", "r"(c1), "r"(c0)', _BOXES),
    Edit("mbar_wait inverted", "prim/bulk.cuh", "@!done bra", "@done bra", _BULK),
    Edit("mbar_wait asks once", "prim/bulk.cuh",
         'done, [%0], %1;\\n@!done bra "\n        "wait_%=;\\n}"', 'done, [%0], %1;\\n}"', _BULK),
    Edit("mbar_init_fence lost", "prim/bulk.cuh",
         'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', "", _BULK),
    Edit("fence_proxy_async lost", "prim/bulk.cuh",
         'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "", _BOXES),
    Edit("tma_store_wait only until read", "prim/bulk.cuh",
         '"cp.async.bulk.wait_group %0;"', '"cp.async.bulk.wait_group.read %0;"', _TURNS),
    Edit("bulk_reduce_add stores", "prim/bulk.cuh",
         '"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0]',
         '"cp.async.bulk.global.shared::cta.bulk_group [%0]', _BULK),
    Edit("semaphore_release does not release", "prim/semaphore.cuh",
         "red.release.gpu.global.add.u32", "red.relaxed.gpu.global.add.u32", _TURNS),
)  # fmt: skip
