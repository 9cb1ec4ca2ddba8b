// e^x, tanh x and log |x| in operations that everything rounds alike, of a thread each.
#if !defined(CF_SAME_BITS)
#define CF_SAME_BITS 1
#endif
#include "element.cuh"

struct Params {
    const double* x;      // one per thread
    double* of_double;    // 3 rows of one per thread
    float* of_float;
};

template <class T> CF_DEVICE void fill(T* out, T x) {
    const int n = blockDim.x, i = threadIdx.x;
    out[i] = natural_exp(x);
    out[n + i] = hyperbolic_tangent(x);
    out[2 * n + i] = natural_log(x < 0 ? -x : x);
}
CF_DEVICE void body(const Params& p) {
    const double x = p.x[threadIdx.x];
    fill(p.of_double, x);
    fill(p.of_float, static_cast<float>(x));
}
CF_KERNEL(Params, 1024, 1, body)
