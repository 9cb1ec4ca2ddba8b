// The kinds of masks that Hopper kernels are compiled for. band: the end of the keys, causal, window. any: also softcap, ALiBi,
// scale <= 0. spans: a band, and spans and blocks; a tile is then of one head.
// Design note: docs/kernels/forward_sm90.md.
#pragma once

enum class Mask { band, any, spans };
