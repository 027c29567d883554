/* W1 by hand: one round of Federated Reconstruction for matrix factorization, on one thread.
 *
 * Each client's ratings are dealt in batches, even ones support, odd ones query, at most `most_steps` of each.
 * Reconstruction: SGD on the user embedding. Update: SGD on the item rows of the client's own copy; every item occurs
 * once in a client, so the copy need not be made: the change of a row is known when it is visited. The mean of the
 * changes, weighted by query examples, is added to the table.
 */
#include <stdlib.h>
#include <string.h>

static float dot(const float *a, const float *b, int dim) {
    float sum = 0;
    for (int k = 0; k < dim; k++) sum += a[k] * b[k];
    return sum;
}

/* Returns the sum of squared errors over the query examples, each measured before its update. */
double w1_round(int clients, const long *begin, const long *end, const int *item, const float *rating,
                const float *user_start, /* (clients, dim) */
                int dim, int batch, int most_steps, float rate_reconstruct, float rate_update,
                long items, float *table, float *change) {
    double total_weight = 0, loss = 0;
    float *user = malloc(sizeof(float) * dim), *gradient = malloc(sizeof(float) * dim);
    memset(change, 0, sizeof(float) * items * dim);
    for (int c = 0; c < clients; c++) {
        const int *ids = item + begin[c];
        const float *y = rating + begin[c];
        int size = (int)(end[c] - begin[c]), weight = 0;
        memcpy(user, user_start + (long)c * dim, sizeof(float) * dim);
        for (int step = 0; step < most_steps && 2 * step * batch < size; step++) {
            int first = 2 * step * batch, last = first + batch < size ? first + batch : size;
            memset(gradient, 0, sizeof(float) * dim);
            for (int i = first; i < last; i++) {
                const float *row = table + (long)ids[i] * dim;
                float slope = 2 * (dot(row, user, dim) - y[i]) / (last - first);
                for (int k = 0; k < dim; k++) gradient[k] += slope * row[k];
            }
            for (int k = 0; k < dim; k++) user[k] -= rate_reconstruct * gradient[k];
        }
        for (int step = 0; step < most_steps && (2 * step + 1) * batch < size; step++) {
            int first = (2 * step + 1) * batch, last = first + batch < size ? first + batch : size;
            weight += last - first;
        }
        for (int step = 0; step < most_steps && (2 * step + 1) * batch < size; step++) {
            int first = (2 * step + 1) * batch, last = first + batch < size ? first + batch : size;
            for (int i = first; i < last; i++) {
                const float *row = table + (long)ids[i] * dim;
                float *row_change = change + (long)ids[i] * dim;
                float error = dot(row, user, dim) - y[i];
                float scale = -rate_update * weight * 2 * error / (last - first);
                loss += (double)error * error;
                for (int k = 0; k < dim; k++) row_change[k] += scale * user[k];
            }
        }
        total_weight += weight;
    }
    if (total_weight > 0)
        for (long i = 0; i < items * dim; i++) table[i] += change[i] / (float)total_weight;
    free(user);
    free(gradient);
    return loss / (total_weight > 0 ? total_weight : 1);
}
