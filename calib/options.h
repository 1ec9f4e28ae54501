/* SPDX-License-Identifier: Apache-2.0 */
/* What the command line of oscar-calib asks for, and its verbs. */
#ifndef OSCAR_CALIB_OPTIONS_H
#define OSCAR_CALIB_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "calib/rope.h"
#include "proto/calibration.h"
#include "proto/cause.h"

/* The two kinds of rotation, as indices of what is fitted for each. */
enum fit_kind { FIT_MATRIX, FIT_HADAMARD, FIT_KINDS };

/* What a calibration is made for, where its input does not say, and where it does not matter. */
#define FIT_UNKNOWN_MODEL "unknown"
#define FIT_ANY_MODEL "any"

/* What is fitted. Every field but `threads` goes into the digest by which an interrupted fit is taken up again. */
struct fit_options {
    const char *model;      /* NULL: the capture's name for it */
    const char *date;       /* NULL: none is written */
    bool kinds[FIT_KINDS];  /* both: the better one is taken */
    bool per_layer;         /* one rotation for all heads of a layer */
    bool proxy;             /* V's target: weights from the queries' covariance instead of attention scores */
    bool centre;            /* of K */
    uint32_t pairs;         /* rotating pairs a head at most */
    bool feedback;          /* rounding of K */
    double lambda;          /* what feedback's metric gets on its diagonal, as a part of its mean */
    bool clip_given;        /* else the ranks are found by a sweep */
    double clip_k, clip_v;  /* ratios of d */
    uint64_t context;       /* tokens: what is to be served */
    double softmax_scale;   /* 0: 1 / sqrt(d) */
    struct rope_given rope; /* what the command line says about RoPE; the capture's metadata says the rest */
    bool allow_singular;
    const char *layers; /* NULL: all; else numbers of the capture's layers, which become layers 0, 1, .. of the file */
    uint32_t threads;
};

#define MAX_BASELINES 8U

struct calib_options {
    struct fit_options fit;
    const char *output;
    const char *calibration;              /* report: the file to be judged */
    const char *fit_on;                   /* report: the capture on which published OSCAR is fitted */
    const char *baselines[MAX_BASELINES]; /* report: NAME=FILE */
    size_t baselines_given;
    const char *svg;
    bool json;
    uint32_t hadamard_layers, hadamard_head_dim;
    uint32_t kv_heads;            /* hadamard, import; 0: not given */
    const char *k_file, *v_file;  /* import: NULL, or a side's file */
    const char *const *arguments; /* captures, the file, or import's folder */
    size_t argument_count;
};

struct fit_options fit_defaults(void);

/* The verbs: 0 or a negative error with its cause. */
int calib_fit(const struct calib_options *options, struct oscar_cause *cause);
int calib_report(const struct calib_options *options, struct oscar_cause *cause);
int calib_inspect(const struct calib_options *options, struct oscar_cause *cause);
int calib_verify(const struct calib_options *options, struct oscar_cause *cause);
int calib_hadamard(const struct calib_options *options, struct oscar_cause *cause);
int calib_import(const struct calib_options *options, struct oscar_cause *cause);

#endif
