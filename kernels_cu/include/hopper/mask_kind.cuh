// What a score of a Hopper kernel can meet. band: the end of the keys, causal, window. any: also softcap, ALiBi,
// scale <= 0. spans: a band, and spans and blocks; a tile is then of one head.
#pragma once

enum class Mask { band, any, spans };
