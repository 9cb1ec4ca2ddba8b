"""Mistakes of second order, wide heads and 8-bit floats, each a change of a line, as of a hand that copies.

They are mutants of tests/simulator/mutate.py beside its deletions: the tests of their kernel must fail.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "FLASH_BACKWARD_F16X3",
    "FLASH_BACKWARD_SM90",
    "FLASH_BACKWARD_WIDE",
    "FLASH_DECODE_IN_ORDER",
    "FLASH_DECODE_LATENT_SM90",
    "FLASH_FORWARD_FP8",
    "FLASH_FORWARD_FP8_SM90",
    "FLASH_FORWARD_SM90",
    "FLASH_FORWARD_WIDE",
    "FLASH_FORWARD_WIDE_SM90",
    "FLASH_HESSIAN",
    "FLASH_REACH",
    "FLASH_TANGENT",
    "KEPT_PAIRS",
    "SIMPLE_HESSIAN",
    "SIMPLE_TANGENT",
    "Mistake",
]


class Mistake(NamedTuple):
    """A change of a source.

    Attributes
    ----------
    name : str
    file : str
        In kernels_cu.
    old, new : str
        `old` is there once.
    """

    name: str
    file: str
    old: str
    new: str


_HEAD = "include/simple/tangent_head.cuh"
_SCORES = (
    Mistake("a tangent of K for one of Q", _HEAD,
            "tangent, gQDot.from(m_first), this->gK.from(n_first)",
            "tangent, this->gQ.from(m_first), gKDot.from(n_first)"),
    Mistake("no slope of the softcap", _HEAD,
            "this->score.softcap_slope(capped) * this->score.scale * tangent", "this->score.scale * tangent"),
    Mistake("no tangent of the bias", _HEAD, "if (!p.bias_dot.data) return score;", "return score;"),
)  # fmt: skip

_TANGENT = "simple_tangent.cu"
SIMPLE_TANGENT = (
    *_SCORES,
    Mistake("the mean of what dropout keeps", _TANGENT,
            "rMean[0][c] += weight.whole * tangent", "rMean[0][c] += weight.whole * weight.kept * tangent"),
    Mistake("no dropout on P", _TANGENT, "rS[0][c] = weight.whole * weight.kept", "rS[0][c] = weight.whole"),
    Mistake("no dropout on P dotS", _TANGENT,
            "rTangent[0][c] = rS[0][c] * tangent", "rTangent[0][c] = weight.whole * tangent"),
    Mistake("no mean in dotO", _TANGENT, "rO[0][c] -= mean *", "rO[0][c] -= Acc(0) *"),
    Mistake("no sinks in the mean", _TANGENT, "if (p.sinks_dot) mean +=", "if (false) mean +="),
    Mistake("P for P dotS", _TANGENT, "Tiles::put_weights(rTangent, s)", "Tiles::put_weights(rS, s)"),
)  # fmt: skip

_STATISTICS = "simple_statistics.cu"
SIMPLE_STATISTICS = (
    Mistake("no LSE", _STATISTICS, "score - head.lse(query)", "score"),
    Mistake("no softcap", _STATISTICS, "head.score.apply_softcap(product)", "product"),
    Mistake("no band", _STATISTICS,
            "if (!contains(head.band.keys_of(query), key)) return -Acc(kInfinity);", ""),
    Mistake("the last column of queries alone", _STATISTICS, "sum += rSum[r][c],", "sum = rSum[r][c],"),
    Mistake("the maximum of a lane", _STATISTICS,
            "largest = max_over_lanes<kLanes>(largest)", "largest = largest"),
    Mistake("the sum of a lane", _STATISTICS, "sum = sum_over_lanes<kLanes>(sum), ", ""),
    Mistake("the entropy of a lane", _STATISTICS, "entropy = sum_over_lanes<kLanes>(entropy);", ""),
    Mistake("0 log 0", _STATISTICS, "if (weight != 0) rEntropy", "rEntropy"),
    Mistake("a maximum without NaN", _STATISTICS, "sum == sum ? largest : sum", "largest"),
)  # fmt: skip

SIMPLE_HESSIAN = (
    *_SCORES,
    Mistake("no mean in dotP", _HEAD, " - gMean[query * p.lse_dot.row]);", ");"),
    Mistake("delta for its tangent", _HEAD, "w.kept - gDeltaDot[query * p.delta_dot.row]",
            "w.kept - this->gDelta[query * this->delta_row]"),
    Mistake("no dropout on dotP", _HEAD, "return {weight * w.kept, d_score", "return {weight, d_score"),
    Mistake("no second derivative of the softcap", _HEAD, "d_product -= 2 *", "d_product -= 0 *"),
    Mistake("no tangent of V", _HEAD,
            "if (p.v_dot.data)\n            add_dots", "if (false)\n            add_dots"),
    Mistake("dotQ for Q", "simple_hessian.cu",
            "Tiles::put_weights(t.d_product, s);\n            Tiles::add_weighted_rows(rDK",
            "Tiles::put_weights(t.of_first, s);\n            Tiles::add_weighted_rows(rDK"),
    Mistake("no delta in the gradient of a sink", _HEAD,
            "(tangent + gDeltaDot[query * p.delta_dot.row])", "tangent"),
)  # fmt: skip

_VALUES = "include/tile/value_products.cuh"
_HALVES = "flash_backward_f16x3_sm90.cu"
_PRODUCTS_OF_RESTS = "    multiply(d, a1, b0, false);\n    multiply(d, a0, b1, true);\n"
FLASH_BACKWARD_F16X3 = (
    Mistake("no second half of A", _HALVES, _PRODUCTS_OF_RESTS, "    multiply(d, a0, b1, false);\n"),
    Mistake("no second half of B", _HALVES, _PRODUCTS_OF_RESTS, "    multiply(d, a1, b0, false);\n"),
    Mistake("one scale of all weights", _HALVES, "of_p(largest_size(rS))", "of_p(0x3f800000u)"),
    Mistake("of dS the scale of a warp", _HALVES,
            "larger(larger(all.x, all.y), larger(all.z, all.w))", "mine"),
    Mistake("the scale of the other Q", _HALVES, "s.q_unit[stage].x", "s.q_unit[stage ^ 1].x"),
    Mistake("the scale of the other dO", _HALVES, "s.do_unit[stage].x", "s.do_unit[stage ^ 1].x"),
    Mistake("second halves of the other keys", _HALVES, "k.of_tile(kConsumers)", "k.of_tile(1)"),
    Mistake("dP without its unit", "include/hopper/transposed_gradient.cuh",
            "fmaf(rDP[4 * n + e], unit, -of(row_delta, e))", "(rDP[4 * n + e] - of(row_delta, e))"),
)  # fmt: skip
FLASH_FORWARD_FP8 = (
    Mistake("odd features for even ones", _VALUES, "b[0] = permute_bytes(r[0], r[1], 0x6420)",
            "b[0] = permute_bytes(r[0], r[1], 0x7531)"),
    Mistake("keys as they lie in the second half", _VALUES, "b[3] = permute_bytes(r[2], r[3], 0x7531)",
            "b[3] = permute_bytes(r[2], r[3], 0x7351)"),
    Mistake("weights of the keys 8 further first", "include/tile/mma.cuh",
            "const float (&left)[4] = d[4 * step + i / 2 * 2];",
            "const float (&left)[4] = d[4 * step + i / 2 * 2 + 1];"),
    Mistake("the factor of the other row", _VALUES,
            "fmaf(x, rescale[m][e / 2],", "fmaf(x, rescale[m][e % 2],"),
    Mistake("the place of a word in odd rows", _VALUES, "g % 2 ? high : low", "low"),
    Mistake("no scale of v", "flash_forward_fp8.cu", "row.normaliser * saved.value", "row.normaliser"),
    Mistake("no scale of k", "flash_forward_fp8.cu", " * scale_of(p.k_scale, work.batch, kv_head)", ""),
    Mistake("words for bytes at the end of a row", "include/tile/tile.cuh",
            "if (at + i < bytes) word", "if (at < bytes) word"),
)  # fmt: skip

_EPILOGUE, _TRANSPOSED = "include/hopper/epilogue.cuh", "include/hopper/transposed_values.cuh"
FLASH_FORWARD_FP8_SM90 = (
    Mistake("the first half of O twice", _EPILOGUE, "(rO[first / 2])", "(rO[0])"),
    Mistake("the second half of O over the first", _EPILOGUE, "sO, first, work", "sO, 0, work"),
    Mistake("the second half of packed rows over the first", _EPILOGUE, "to + first;", "to;"),
    Mistake("packed rows of all columns by each half", _EPILOGUE, "head_dim_v - first)", "head_dim_v)"),
    Mistake("the second half of O before the first has left", _EPILOGUE, "tma_store_wait_read<0>();",
            "if (first + kPart == K::kHeadDimV) tma_store_wait_read<0>();"),
    Mistake("a Q over the first half of O", _EPILOGUE, "} else if (leader) {\n            mbar",
            "}\n        if (leader) {\n            mbar"),
    Mistake("the other V as it came", "flash_forward_fp8_sm90.cu", "(s.transposed[at.stage], s.v[at.stage]",
            "(s.transposed[at.stage], s.v[at.stage ^ 1]"),
    Mistake("the same keys at once", _TRANSPOSED, "from_unit + i * (32 * From::kSwizzle)", "from_unit"),
    Mistake("the next places where they are swapped", _TRANSPOSED, "to_unit ^ (32 * i)", "to_unit + 32 * i"),
)  # fmt: skip

FLASH_FORWARD_SM90 = (
    Mistake("one unseen block too few", "include/hopper/online_softmax.cuh",
            "smaller(work.blocks, cdiv(end, K::kBlockN))", "smaller(work.blocks, cdiv(end, K::kBlockN) + 1)"),
    Mistake("one unseen block too many", "include/hopper/online_softmax.cuh",
            "smaller(work.blocks, cdiv(end, K::kBlockN))", "smaller(work.blocks, end / K::kBlockN)"),
    Mistake("rows past the last query see keys", "include/hopper/online_softmax.cuh",
            "work.rows.query(first) > last ? 0 : ", ""),
    Mistake("unseen K given back before it has come", "flash_forward_sm90.cu",
            "s.k_ring.wait(at.k);\n        // sync: every warp", "// sync: every warp"),
    Mistake("unseen V given back before it has come", "flash_forward_sm90.cu",
            "s.v_ring.wait(at.v);\n        // sync: the same", "// sync: the same"),
    Mistake("an unseen K kept", "flash_forward_sm90.cu",
            "s.k_ring.release(at.k);\n        at.k.advance();\n        warp_scheduler_barrier_arrive",
            "at.k.advance();\n        warp_scheduler_barrier_arrive"),
    Mistake("unseen blocks without their turns", "flash_forward_sm90.cu",
            "warp_scheduler_barrier_sync<Kernel>(warpgroup);\n        else bar",
            "bar_sync(kSkipped + warpgroup, 128);\n        else bar"),
    Mistake("unseen blocks that pass no turn", "flash_forward_sm90.cu",
            "at.k.advance();\n        warp_scheduler_barrier_arrive<Kernel>(warpgroup);", "at.k.advance();"),
    Mistake("the last unseen V not passed over", "flash_forward_sm90.cu",
            "if (seen < work.blocks) products.skip_v", "if (false) products.skip_v"),
    Mistake("unseen V passed over a block early", "flash_forward_sm90.cu",
            "if (block < work.blocks - 1) products.skip_v", "products.skip_v"),
    Mistake("the end of an unseen V not cleared", "flash_forward_sm90.cu",
            "clear_v_tail(p, s, work, at, block);\n", "\n"),
    Mistake("maxima replaced by the vote of a warp", "include/tile/online_softmax.cuh",
            "if (highest - threshold <= row_max[m][half]) return", "if (highest <= row_max[m][half]) return"),
)  # fmt: skip

_WIDE, _SHARED_SOFTMAX = "flash_forward_wide.cu", "include/tile/shared_softmax.cuh"
FLASH_FORWARD_WIDE = (
    Mistake("the maximum of the keys of one warp", _SHARED_SOFTMAX, "for (int w = 1; w < kKeyWarps; w++)",
            "for (int w = 1; w < 1; w++)"),
    Mistake("sums of the keys of one warp", _SHARED_SOFTMAX, "for (int w = 0; w < kKeyWarps; w++) sum +=",
            "for (int w = 0; w < 1; w++) sum +="),
    Mistake("a mask of the other half of the keys", _WIDE,
            "block * kBlockN + key_first", "block * kBlockN"),
    Mistake("a softcap of products", _WIDE,
            "static_cast<float>(score.softcap) * unit", "static_cast<float>(score.softcap)"),
    Mistake("a slope of products", _WIDE,
            "(score.alibi_slopes)[slope_at] * unit", "(score.alibi_slopes)[slope_at]"),
    Mistake("ALiBi from the first key", _WIDE, "at.row + saved.offset - at.column", "at.row - at.column"),
    Mistake("factors of the first rows for all", _SHARED_SOFTMAX, "const int g = 16 * m +", "const int g ="),
    Mistake("P of the first keys for all", _WIDE, "weights.reader.begin_at(chunk);", ""),
    Mistake("a chunk too far ahead", _WIDE, "int later = chunk + kSlots - 1;", "int later = chunk + kSlots;"),
)  # fmt: skip

_WIDE_SM90 = "flash_forward_wide_sm90.cu"
FLASH_FORWARD_WIDE_SM90 = (
    Mistake("no wait for V", _WIDE_SM90,
            "for (int c = 0; c < kHalf; c++) s.ring.wait(at), at.advance();", ""),
    Mistake("no wait for K", _WIDE_SM90,
            "for (int c = 0; c < kKChunks; c++) s.ring.wait(chunk), chunk.advance();", ""),
    Mistake("the other half not rescaled", _WIDE_SM90,
            "rescale_o(rO, __any_sync(0xffffffffu, factor.x != 1.0f || factor.y != 1.0f), factor);", ""),
    Mistake("rows of the next sequence times 0", _WIDE_SM90,
            "if (block == work.blocks - 1) values.clear(p.call, work, at, 1);", ""),
    Mistake("V of the next block", _WIDE_SM90, "if (work.blocks > 1) skip(at.v, kKChunks);", ""),
    Mistake("Q freed by half of the warps", _WIDE_SM90, "s.q_ring.init(8)", "s.q_ring.init(4)"),
)  # fmt: skip

_F64, _DOUBLES = "flash_forward_f64.cu", "include/tile/double_products.cuh"
FLASH_FORWARD_F64 = (
    Mistake("every block taken as whole", _F64,
            "if (uint32_t(block - whole_first) >= uint32_t(whole_blocks))", "if (false)"),
    Mistake("rows of the first warp for all", _F64, "rows_of_q(smem_addr(s.q.data), row_first)",
            "rows_of_q(smem_addr(s.q.data), 0)"),
    Mistake("sums of one lane each", _F64, "softmax[half].finalize<4>(sink)",
            "softmax[half].finalize<1>(sink)"),
    Mistake("O not rescaled", _F64, "rO[n][2 * half] *= rescale, rO[n][2 * half + 1] *= rescale;", ";"),
    Mistake("P in the order of its columns", _DOUBLES, "multiply_step<kRows>(d[n], {w[0], w[2], w[1], w[3]}",
            "multiply_step<kRows>(d[n], {w[0], w[1], w[2], w[3]}"),
    Mistake("chunks of O in the order of V's", _DOUBLES, "4 * n + pair_chunk(threadIdx.x % 4 * 2 + i)",
            "4 * n + int(threadIdx.x % 4 * 2 + i)"),
    Mistake("the second half of k left out", _DOUBLES, "mma_m8n8k4_f64(d[2], d[3], a[3], b1);", ""),
)  # fmt: skip

# Of gradients: whose LSE and delta an element has, in rows and in columns.
_F64_BACKWARD = "flash_backward_f64.cu"
FLASH_BACKWARD_F64 = (
    Mistake("every tile taken as whole", _F64_BACKWARD, "if (!whole) mask_band(s, at, band);", ""),
    Mistake("keys of the first warp for all", _F64_BACKWARD, "rows_of_k(smem_addr(s.k.data), row_first)",
            "rows_of_k(smem_addr(s.k.data), 0)"),
    Mistake("no LSE", _F64_BACKWARD, "natural_exp(s[0][n][e] - lse[query(n, e)])",
            "natural_exp(s[0][n][e])"),
    Mistake("no delta", _F64_BACKWARD, "(dp[n][e] - delta[query(n, e)])", "dp[n][e]"),
    Mistake("LSE of a row without keys as it is", _F64_BACKWARD,
            "x == -double(kInfinity) ? kInfinity : x", "x"),
    Mistake("LSE of the first head for all", _F64_BACKWARD, "of_head(p, sequence, head)",
            "of_head(p, sequence, first_head)"),
    Mistake("queries of dkv in rows", _F64_BACKWARD, "return 2 * n + e % 2;", "return 2 * n + e / 2;"),
    Mistake("dS for P", _F64_BACKWARD, "(rDV, rS[0],", "(rDV, rDP,"),
    Mistake("dK without scale", _F64_BACKWARD, "store_rows(rDK, scale,", "store_rows(rDK, one,"),
    Mistake("dQ without scale", _F64_BACKWARD, "store_rows(rDQ, scale,", "store_rows(rDQ, {1, 1},"),
    Mistake("a head of keys for each of queries", _F64_BACKWARD,
            "kv_head = work.head / (p.shape.heads_q / p.shape.heads_k)", "kv_head = work.head"),
)  # fmt: skip

# Of keys that are not there, and of a ring that is one step short.
_DECODE_WIDE = "flash_decode_wide.cu"
FLASH_DECODE_WIDE = (
    Mistake("keys without a page seen", _DECODE_WIDE, "s.nowhere[stage][column]", "false"),
    Mistake("a stage filled while it is read", _DECODE_WIDE,
            "start(tile + kStages - 1);", "start(tile + kStages);"),
    Mistake("keys overwritten while they are read", _DECODE_WIDE,
            "start(tile + kStages);", "start(tile + kStages + 1);"),
    Mistake("keys widened over values that are read", _DECODE_WIDE, "s.at(tile % kTiles)", "s.at(0)"),
    Mistake("the last chunks of a row not widened", _DECODE_WIDE,
            "kEven || chunk < StoredTile::kChunks", "kEven || chunk < StoredTile::kChunks - 4"),
    Mistake("chunks of the next row copied", _DECODE_WIDE,
            "if (!kEven && copied_chunk + i * kRowThreads", "if (false && i"),
    Mistake("columns beyond the last", _DECODE_WIDE, "smaller(16, bytes - i * kRowThreads * 16)", "16"),
    Mistake("values without their scale", _DECODE_WIDE, "done.normaliser * v_scale", "done.normaliser"),
    Mistake("drafts seen by all", _DECODE_WIDE, "if (drafts) mask_drafts", "if (false) mask_drafts"),
    # The maximum of warp 0 for all would be as good a reference as any; each its own is none.
    Mistake("maxima of one warp", _SHARED_SOFTMAX, "highest = fmaxf(highest, storage.of_warp[w][row(half)])",
            "(void)w, highest = storage.of_warp[key_warp][row(half)]"),
    Mistake("some of the features", _DECODE_WIDE, "rS[0][n][0] += x.x, ", ""),
    Mistake("sinks in every part", _DECODE_WIDE, "p.score.sinks && !parted", "p.score.sinks"),
)  # fmt: skip

# Of columns that two warpgroups share, and of keys that are not there.
_LATENT_SM90 = "flash_decode_latent_sm90.cu"
FLASH_DECODE_LATENT_SM90 = (
    Mistake("no wait for keys", _LATENT_SM90,
            "s.ring.wait(at);\n        wgmma_fence_operand(rS);", "wgmma_fence_operand(rS);"),
    Mistake("keys freed by one warpgroup", _LATENT_SM90, "s.ring.init(2);", "s.ring.init(1);"),
    Mistake("keys without a page seen", _LATENT_SM90, "nowhere ? 0 : seen.end", "seen.end"),
    Mistake("every row sees what the first does", _LATENT_SM90,
            "band.keys_of(work.block.row(row).query)", "band.keys_of(work.block.row(0).query)"),
    Mistake("the end of the keys forgotten", _LATENT_SM90, " || key + kBlockN > whole_end", ""),
    Mistake("numbers behind the last key times 0", _LATENT_SM90, "if (rows < kBlockN) {", "if (false) {"),
    Mistake("numbers behind the last key times 0 in one half", _LATENT_SM90,
            "if (rows < kBlockN) {", "if (rows < kBlockN && warpgroup == 0) {"),
    Mistake("the first values for both halves", _LATENT_SM90,
            "values(s.keys[0], warpgroup * kHalf)", "values(s.keys[0], 0)"),
    Mistake("the other half not rescaled", _LATENT_SM90,
            "Softmax::rescale_o(as_tile(half_of_o.o), 0, factor);", ""),
    Mistake("every part from the first key", _LATENT_SM90,
            "(steps.first + step) * kBlockN", "step * kBlockN"),
    Mistake("sinks in every part", _LATENT_SM90, "p.score.sinks && !p.partial_o", "p.score.sinks"),
)  # fmt: skip

# Of what gives other bits, or keys that are not there.
_IN_ORDER = "flash_decode_in_order.cu"
FLASH_DECODE_IN_ORDER = (
    Mistake("weights summed from the last", "include/tile/online_softmax.cuh",
            "sum += weights[m][n][2 * half + i]", "sum += weights[m][kN - 1 - n][2 * half + i]"),
    Mistake("the highest score of one warp", _IN_ORDER,
            "highest = fmaxf(highest, s.row_max[g + 8 * half][w])", "(void)w"),
    Mistake("keys without a page seen", _IN_ORDER, "absent ? 0 : row.end_key", "row.end_key"),
    Mistake("blocks from the first key seen", _IN_ORDER,
            "keys.first / kBlockN * kBlockN", "keys.first / kStepKeys * kStepKeys"),
)  # fmt: skip

# Of sums of dQ in turns: who stores, who adds, where and when, and what nobody has added to.
_BACKWARD, _TURNS = "include/hopper/backward.cuh", "include/hopper/dq_order.cuh"
FLASH_BACKWARD_SM90 = (
    Mistake("the first to add to dQ adds", _BACKWARD,
            "bulk_store(sums, s.dq, sizeof s.dq)", "bulk_reduce_add(sums, s.dq, sizeof s.dq)"),
    Mistake("the second to add to dQ stores, too", _BACKWARD,
            "bulk_reduce_add(sums, s.dq, sizeof s.dq);",
            "if (p.call.dq_turns && turn == 1) bulk_store(sums, s.dq, sizeof s.dq);\n"
            "else bulk_reduce_add(sums, s.dq, sizeof s.dq);"),
    Mistake("sums that nobody has added to are rounded, too", "flash_backward.cu", "if (one) Sums", "Sums"),
    Mistake("the second sum of a tile is forgotten", "flash_backward.cu",
            "chains == 2 && exists(1)", "false"),
    Mistake("all waves add to one sum", _TURNS, "return wave != 0 && !up;", "return 0;"),
    Mistake("waves towards the last queries count the block itself", _TURNS,
            "smaller(seen.end, first + wave) - 1 - block", "smaller(seen.end, first + wave) - block"),
    Mistake("all keys: one tile too many in the second sum", _TURNS,
            "if (all) return tile < home;", "if (all) return tile <= home;"),
    Mistake("all keys: earlier waves add to both sums", _TURNS,
            "number * begun + place;", "number * wave + place;"),
)  # fmt: skip

# Of warps that share columns: whose parts, rows and columns they are.
_WIDE = "flash_backward_wide.cu"
FLASH_BACKWARD_WIDE = (
    Mistake("parts of all warps but the last", _WIDE, "int w = 1; w < kWarps;", "int w = 1; w < kWarps - 1;"),
    Mistake("parts of the other half of the rows", _WIDE,
            "float2{block[i % 2 * 2], block[i % 2 * 2 + 1]}", "float2{block[0], block[1]}"),
    Mistake("the band of the first key for both", _WIDE, "first <= 1 && end > 1", "first <= 0 && end > 0"),
    Mistake("no LSE", _WIDE, "fmaf(score.y, unit_log2, -lse * kLog2e)", "score.y * unit_log2"),
    Mistake("no delta", _WIDE, "p.x * (dp.x - delta)", "p.x * dp.x"),
    Mistake("LSE of the other stage", _WIDE, "&s.rows[step % kStages][0][pair.row]",
            "&s.rows[(step + 1) % kStages][0][pair.row]"),
    Mistake("LSE of the first head for all", _WIDE, "head_rows<float>(of, work.batch, head,",
            "head_rows<float>(of, work.batch, first_head,"),
    Mistake("columns beyond the last", _WIDE, "smaller<int32_t>(columns - column, kColumns)", "kColumns"),
    Mistake("columns of the next warp", _WIDE,
            "smaller<int32_t>(columns - column, kColumns)", "columns - column"),
    Mistake("16 bytes, wherever rows start", _WIDE, "if (width == 16)", "if (true)"),
    Mistake("K for V and Q for dO", _WIDE, "second.fill(Operand(smem_addr(held[1].data)",
            "second.fill(Operand(smem_addr(held[0].data)"),
    Mistake("dS for P", _WIDE, "rDV, ColumnsAsA<WeightTile, 1>(sP", "rDV, ColumnsAsA<WeightTile, 1>(sDS"),
    Mistake("dK without scale", _WIDE, "rDK, scale,", "rDK, 1.0f,"),
    Mistake("dQ without scale", _WIDE, "rDQ, scale,", "rDQ, 1.0f,"),
    Mistake("a head of keys for each of queries", _WIDE,
            "kv_head = work.head / (p.shape.heads_q / p.shape.heads_k)", "kv_head = work.head"),
)  # fmt: skip

# Of spans and blocks on Hopper: what flash_reach finds, and how it comes to the consumers.
FLASH_REACH = (
    Mistake("intervals that end with the first of their stops", "flash_reach.cu",
            "first_start < along.end && along.first < last_stop",
            "first_start < along.end && along.first < first_stop"),
    Mistake("whole, though one block of the mask is partial", "flash_reach.cu",
            "whole = whole && code == 1", "whole = whole && code != 0"),
    Mistake("whole, though the band hides some", "flash_reach.cu",
            "whole = band.keeps_all(queries.first, queries.end, keys.first, keys.first + kBlockN)",
            "whole = true"),
    Mistake("bits of keys in other places than their rows'", "include/hopper/masked_pairs.cuh",
            "4 << i)", "2 << i)"),
    Mistake("a vote on the rows of one half", "include/hopper/masked_pairs.cuh",
            "(seen[0] & seen[1]) == ~0u", "seen[1] == ~0u"),
    Mistake("a vote of lanes, each for itself", "include/hopper/masked_pairs.cuh",
            "if (__all_sync(0xffffffffu, (seen[0] & seen[1]) == ~0u)) return;",
            "if (__any_sync(0xffffffffu, (seen[0] & seen[1]) == ~0u)) return;"),
    Mistake("of two intervals the first", "include/hopper/masked_pairs.cuh",
            "} else if (again(rule.span_intervals) > 1) next();", "}"),
    Mistake("starts far before the tile wrap", "include/hopper/masked_pairs.cuh",
            "smaller(larger(bound, first_query) - first_query, 16)",
            "smaller(larger(bound - first_query, 0), 16)"),
    Mistake("starts far before the keys wrap", "include/hopper/masked_pairs.cuh",
            "larger(bound, key) - key", "larger(bound - key, 0)"),
    Mistake("the end of the keys forgotten where there is no band", "include/hopper/online_softmax.cuh",
            "if (open && first + K::kBlockN <= work.sequence.seqlen_k) return;", "if (open) return;"),
    Mistake("a band taken for none", "include/hopper/online_softmax.cuh",
            "rule.left >= kOpen && rule.right >= kOpen", "rule.left >= kOpen || rule.right >= kOpen"),
    Mistake("partial blocks told as whole ones", "include/hopper/sparse_blocks.cuh",
            "<< 1 | (left.partial >> bit & 1)", "<< 1"),
    Mistake("blocks of keys are told in the place of V", "include/hopper/producer.cuh",
            "return s.sparse_blocks[at.phase][at.stage];", "return s.sparse_blocks[at.phase ^ 1][at.stage];"),
    Mistake("gradients: partial tiles told as whole ones", "include/hopper/backward.cuh",
            "static_cast<uint32_t>(partial)", "0u"),
    Mistake("gradients: words of the tile before", "include/hopper/backward.cuh",
            "s.kept.apply(rS, stage, warp_key)", "s.kept.apply(rS, stage ^ 1, warp_key)"),
    Mistake("gradients: words that nobody makes", "include/hopper/backward.cuh",
            "stage, is_lse);", "stage, 0);"),
    Mistake("gradients: of the tile's word only the first seen one", "include/hopper/backward.cuh",
            "left ^= 1u << tile % 32;", "left = 0;"),
)  # fmt: skip

# Of the words that tell which pairs of a partial tile count, in gradients on Hopper.
_KEPT = "include/hopper/kept_pairs.cuh"
KEPT_PAIRS = (
    Mistake("a vote on rows that have some", _KEPT, "__all_sync(0xffffffffu, x == 0 || x == ~0u)", "true"),
    Mistake("a vote that counts for nothing", _KEPT, "x = column;", "(void)column;"),
    Mistake("a vote on what is left", _KEPT, "__ballot_sync(0xffffffffu, x != 0)",
            "__ballot_sync(0xffffffffu, x == 0)"),
    Mistake("parts of many minds are not transposed", _KEPT, "mixed |= 1u << part;", "(void)0;"),
    Mistake("of parts of many minds only the last", _KEPT, "mixed ^= 1u << part;", "mixed = 0;"),
    Mistake("bits change places with too few lanes", _KEPT,
            "distance > 0; distance /= 2", "distance > 1; distance /= 2"),
    Mistake("intervals of keys told as those of queries", _KEPT,
            "!spans.bounds || spans.by_query != kOfQueries", "!spans.bounds"),
    Mistake("keys without their own intervals where there are blocks", _KEPT,
            "(!of_queries || rule.spans.data)", "!of_queries"),
    Mistake("words of blocks forgotten", _KEPT, "kept &= ld_shared<uint32_t>(at);", ";"),
    Mistake("words of blocks that the other warp makes", _KEPT,
            "part % kWarps != warp", "part % kWarps == warp"),
    Mistake("one interval of two", _KEPT,
            "const bool two = rule.span_intervals > 1;", "const bool two = false;"),
    Mistake("starts before the band", _KEPT, "within(larger(start, first))", "within(start)"),
    Mistake("stops after the band", _KEPT, "within(smaller(stop, end))", "within(stop)"),
    Mistake("keys past the last", _KEPT, "row < rows ? row - band.low + 1 : 0", "row - band.low + 1"),
    Mistake("parts that start where the row does", _KEPT, "(bounds & 255) - 32 * part", "(bounds & 255)"),
    Mistake("codes of the first rows for all", _KEPT, "lane() / 16 * 16 + again(half)", "again(half)"),
    Mistake("halves of the first rows' blocks", _KEPT,
            "row() / 16 * 16, first_key", "row() / 32 * 32, first_key"),
    Mistake("the first half for both", _KEPT, "& 0xffff) | kept << 16", "& 0xffff) | kept"),
    Mistake("two bytes of a wide block", _KEPT, "byte(0) | byte(1) | byte(2) | byte(3)", "byte(0) | byte(1)"),
    Mistake("numbers that stand for no bits kept", _KEPT, "return code == 1 ? ~0u : 0;", "return ~0u;"),
)  # fmt: skip

_FLASH = "flash_tangent.cu"
_PAIR = "include/tile/tile_pair.cuh"
FLASH_TANGENT = (
    Mistake("a product of dotK left out", _PAIR,
            "Math::multiply(tangent[m][n + half], a_step[m], b_step, half)", "(void)tangent"),
    Mistake("dotQ and Q exchanged", _PAIR,
            "Math::multiply(tangent[m][n + half], a_dot_step[m], b_step, half)",
            "Math::multiply(tangent[m][n + half], a_step[m], b_step, half)"),
    Mistake("the tile of K for that of dotK", _FLASH, "q_rows, sK + KTile::kBytes", "q_rows, sK"),
    Mistake("the tile of V for that of dotV", _FLASH, "rS, sV + VTile::kBytes", "rS, sV"),
    Mistake("the mean of what dropout keeps", _FLASH,
            "mean[e / 2] += rDot[0][n][e];", "mean[e / 2] += dropout.active() ? 0.0f : rDot[0][n][e];"),
    Mistake("no dropout on P dotS", _FLASH, "rS[0][n][e] == 0 ? 0.0f : rDot[0][n][e]", "rDot[0][n][e]"),
    Mistake("no dropout on P", _FLASH, "drop_weights(rS, at, dropout)", "drop_weights(rDot, at, dropout)"),
    Mistake("no scale of what dropout keeps", _FLASH, "x = x * kept -", "x = x -"),
    Mistake("no slope of the softcap", _FLASH, "scale * score.head.softcap_slope(rS[0][n][e])", "scale"),
    Mistake("no mean in dotO", _FLASH, "- of_row * widen(o[column])", ""),
    Mistake("the mean of one lane", _FLASH, "sum_over_lanes<4>(mean[half])", "mean[half]"),
    Mistake("no sinks in the mean", _FLASH, "if (sink != -kInfinity) of_row +=", "if (false) of_row +="),
    Mistake("every block of keys taken as whole", _FLASH,
            "if (!contains(whole, tile)) mask_band", "if (false) mask_band"),
)  # fmt: skip

_HESSIAN = "flash_hessian.cu"
_SECOND = "include/backward/second_gradient.cuh"
_TANGENT_QUERIES = "include/backward/tangent_queries.cuh"
FLASH_HESSIAN = (
    Mistake("no slope of the softcap", _SECOND, "slope[e] * score.head.scale * tangent[e]",
            "score.head.scale * tangent[e]"),
    Mistake("no mean in dotP", _SECOND, "(score_dot - row.mean)", "score_dot"),
    Mistake("no delta", _SECOND, "dp[e] - row.delta;", "dp[e];"),
    Mistake("no tangent of delta", _SECOND, "(dp_dot[e] - row.delta_dot)", "dp_dot[e]"),
    Mistake("no second derivative of the softcap", _SECOND,
            "-2.0f / (score.head.softcap", "0.0f / (score.head.softcap"),
    Mistake("no slope of the gradient", _SECOND, "dp_dot[e] = d_score * slope[e]", "dp_dot[e] = d_score"),
    Mistake("P for dotP", _SECOND, "s[e] = weight_dot", "s[e] = weight"),
    Mistake("rows of queries for its columns", _SECOND, "kKeysInRows ? e % 2 : e / 2", "e / 2"),
    Mistake("no ALiBi", _SECOND, "score.add_alibi(x, at)", "(void)0"),
    Mistake("every tile taken as whole", _SECOND, "if (!whole) mask_band", "if (false) mask_band"),
    Mistake("delta for the mean", _TANGENT_QUERIES, "which == 1 ? p.lse_dot", "which == 1 ? p.call.delta"),
    Mistake("the slot of Q for that of dotQ", _HESSIAN, "pair_address + T::kBytes", "pair_address"),
    Mistake("the rows of V for those of dotV", _HESSIAN, "reader.load(r, m * T::kRows, step)",
            "reader.load(r, 0 * m, step)"),
    Mistake("dotdQ without scale", _HESSIAN, "factor[1][2] = {{scale, scale}};\n    Element* dq",
            "factor[1][2] = {{1.0f, 1.0f}};\n    Element* dq"),
)  # fmt: skip
