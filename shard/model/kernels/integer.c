// Products of rounded weights (integer.h). Compiled once per element type (-DBF16=0 or 1); in bfloat16 with whole decoder
// layers.
#include "model/kernels/integer.h"

// x: [rows, num_in]; scratch: [rows, row_bytes] -> y: [rows, num_out]
void linear(const Matrix *m, const element *x, int64_t rows, int64_t x_stride, uint8_t *scratch, element *y, int threads) {
    multiply_all(&m, 1, x, rows, x_stride, scratch, &y, threads);
}

#if BF16
#include "model/kernels/decoder_layer.h"

static void multiply(const element *x, int64_t rows, int64_t k, const void *packed, int64_t n, const float *bias,
                     void *spare, element *y, int threads) {
    linear(packed, x, rows, k, spare, y, threads);
}

static void plain_mlp(const DecoderLayer *layer, const element *x, int64_t rows, element *hidden, void *spare, element *y,
                      int threads) {
    element *up = hidden + rows * layer->num_hidden;
    const Matrix *both[] = {layer->gate, layer->up};
    element *const outputs[] = {hidden, up};
    multiply_all(both, 2, x, rows, layer->width, spare, outputs, threads);
    gate_times(hidden, up, rows, layer->num_hidden, layer->is_tanh, hidden, threads);
    linear(layer->down, hidden, rows, layer->num_hidden, spare, y, threads);
}
#endif
