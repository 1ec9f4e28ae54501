/* SPDX-License-Identifier: Apache-2.0 */
/* oscar-calib: calibrations from captured activations. The tables below are the command line: they give the parser and the
 * help. */
#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/options.h"
#include "calib/parallel.h"
#include "proto/geometry.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum { STATUS_OK, STATUS_FAILED, STATUS_USAGE };

enum verb_bit { FIT = 1, REPORT = 2, INSPECT = 4, VERIFY = 8, HADAMARD = 16, IMPORT = 32 };

static const struct verb {
    const char *name;
    enum verb_bit bit;
    int (*run)(const struct calib_options *options, struct oscar_cause *cause);
    const char *arguments;
    size_t least, most; /* arguments */
    const char *help;
} verbs[] = {
    {"fit", FIT, calib_fit, "CAPTURE...", 1, SIZE_MAX, "make a calibration file of captured activations"},
    {"report", REPORT, calib_report, "CAPTURE...", 1, SIZE_MAX,
     "errors on a capture that the fit has not seen, beside other methods'"},
    {"inspect", INSPECT, calib_inspect, "FILE", 1, 1, "what a calibration file holds"},
    {"verify", VERIFY, calib_verify, "FILE", 1, 1, "check every number of a calibration file"},
    {"hadamard", HADAMARD, calib_hadamard, "", 0, 0, "make a file of plain Hadamard rotations, without any capture"},
    {"import", IMPORT, calib_import, "[FOLDER]", 0, 1, "make a file of published rotations, which are PyTorch files"},
};

/* The letters are only names for take_parameter(). */
static const struct parameter {
    const char *name;
    int letter;
    const char *argument; /* NULL: none */
    unsigned verbs;
    const char *help;
} parameters[] = {
    {"output", 'o', "FILE", FIT | HADAMARD | IMPORT, "the file to write"},
    {"model", 'm', "NAME", FIT | REPORT | HADAMARD | IMPORT,
     "what it is made for; default: the input's name for it; report: another name of the capture's model"},
    {"rotation", 'r', "KIND", FIT, "matrix, hadamard, or auto: the better one, hadamard on a tie; default: auto"},
    {"per", 'p', "WHAT", FIT, "a matrix for each head, or one for a layer; default: head"},
    {"v-target", 't', "WHAT", FIT, "scores (causal attention) or proxy (of the published code); default: scores"},
    {"no-centre", 'C', NULL, FIT, "leave K where it is"},
    {"pairs", 'P', "N", FIT, "RoPE pairs of a head whose centre turns, at most 16; 0: a constant centre; default: 16"},
    {"rounding", 'R', "KIND", FIT, "of K: feedback or nearest; default: feedback"},
    {"lambda", 'l', "X", FIT, "of feedback: a part of the mean on the metric's diagonal; default: 0.02"},
    {"clip", 'c', "K,V", FIT | IMPORT, "clip ratios, as .96,.92; default: fit: ranks by a sweep; import: .96,.92"},
    {"layers", 'L', "LIST", FIT | HADAMARD | IMPORT,
     "fit, import: these layers of the input, as layers 0, 1, .. of the file, by default all; hadamard: how many"},
    {"context", 'x', "TOKENS", FIT, "what is to be served; a shorter capture is warned of; default: 8192"},
    {"softmax-scale", 's', "X", FIT | REPORT,
     "of the model's attention; default: the capture's, or 1 / sqrt(head size)"},
    {"rope-base", 'b', "X", FIT, "default: the capture's"},
    {"rope-pairs", 'h' + 256, "WHICH", FIT,
     "dims that turn together: halves, interleaved or none; default: the capture's"},
    {"rope-dims", 'd' + 256, "N", FIT, "the first N dims turn; default: the capture's, or all"},
    {"allow-singular", 'S', NULL, FIT, "take covariances that do not span all dims"},
    {"date", 'D', "TEXT", FIT | IMPORT, "to be put into the file, which is else the same for the same input"},
    {"calibration", 'f', "FILE", REPORT, "the file to judge"},
    {"fit-on", 'F', "CAPTURE", REPORT, "fit the published method on this one, to be compared with"},
    {"baseline", 'B', "NAME=FILE", REPORT, "another calibration to compare with; may be given several times"},
    {"svg", 'v', "FILE", REPORT, "write a picture of it"},
    {"json", 'j', NULL, REPORT | INSPECT, "JSON lines for programs"},
    {"k", 'K', "FILE", IMPORT, "the rotations of K, with --v; else FOLDER holds k_rotation*.pt and v_rotation*.pt"},
    {"v", 'w', "FILE", IMPORT, "the rotations of V"},
    {"kv-heads", 'k', "N", HADAMARD | IMPORT, "KV heads of the model; import: default: as many as the input says"},
    {"head-dim", 'e', "N", HADAMARD, "head size: 64, 128 or 256"},
    {"threads", 'T', "N", FIT | REPORT, "default: as many as there are processors; the result does not depend on it"},
    {"help", 'h', NULL, 0, "this text"},
    {"version", 'V', NULL, 0, "of this program"},
};

static void print_help(FILE *stream) {
    (void)fprintf(stream, "usage: oscar-calib VERB [options] [arguments]\n\nverbs:\n");
    for (size_t i = 0; i < COUNT(verbs); i++)
        (void)fprintf(stream, "  %-9s %-13s %s\n", verbs[i].name, verbs[i].arguments, verbs[i].help);
    for (size_t v = 0; v < COUNT(verbs); v++) {
        bool any = false;
        for (size_t i = 0; i < COUNT(parameters); i++) {
            const struct parameter *parameter = &parameters[i];
            char left[40];
            if ((parameter->verbs & verbs[v].bit) == 0)
                continue;
            if (!any)
                (void)fprintf(stream, "\noptions of %s:\n", verbs[v].name);
            any = true;
            (void)snprintf(left, sizeof(left), "--%s%s%s", parameter->name, parameter->argument != NULL ? " " : "",
                           parameter->argument != NULL ? parameter->argument : "");
            (void)fprintf(stream, "  %-23s %s\n", left, parameter->help);
        }
    }
    (void)fprintf(stream, "\nexit status: %d success, %d failure, %d wrong usage\n", STATUS_OK, STATUS_FAILED,
                  STATUS_USAGE);
}

__attribute__((format(printf, 1, 2))) static int wrong_usage(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)fprintf(stderr, "oscar-calib: ");
    (void)vfprintf(stderr, format, arguments);
    (void)fprintf(stderr, " (oscar-calib --help)\n");
    va_end(arguments);
    return STATUS_USAGE;
}

/* --- reading the command line ------------------------------------------------------------------------------------- */

static bool read_count(const char *text, uint64_t least, uint64_t most, uint64_t *ret) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || value < least || value > most)
        return false;
    *ret = value;
    return true;
}

static bool read_small_count(const char *text, uint32_t least, uint32_t most, uint32_t *ret) {
    uint64_t value;
    if (!read_count(text, least, most, &value))
        return false;
    *ret = (uint32_t)value;
    return true;
}

/* above < value <= most, and nothing after it but `stop` */
static bool read_number(const char *text, double above, double most, char stop, const char **ret_end, double *ret) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != stop || !(value > above && value <= most))
        return false;
    if (ret_end != NULL)
        *ret_end = end + 1;
    *ret = value;
    return true;
}

static bool read_kinds(const char *text, bool kinds[FIT_KINDS]) {
    bool any = strcmp(text, "auto") == 0;
    kinds[FIT_MATRIX] = any || strcmp(text, "matrix") == 0;
    kinds[FIT_HADAMARD] = any || strcmp(text, "hadamard") == 0;
    return kinds[FIT_MATRIX] || kinds[FIT_HADAMARD];
}

/* One of two words. */
static bool read_choice(const char *text, const char *off, const char *on, bool *ret) {
    *ret = strcmp(text, on) == 0;
    return *ret || strcmp(text, off) == 0;
}

static bool read_clip(const char *text, struct fit_options *fit) {
    const char *second;
    fit->clip_given = true;
    return read_number(text, 0, 1, ',', &second, &fit->clip_k) && read_number(second, 0, 1, '\0', NULL, &fit->clip_v);
}

static bool take_baseline(struct calib_options *options, const char *text) {
    const char *equals = strchr(text, '=');
    if (equals == NULL || equals == text || equals[1] == '\0' || options->baselines_given == MAX_BASELINES)
        return false;
    options->baselines[options->baselines_given++] = text;
    return true;
}

/* False when the argument means nothing. */
static bool take_parameter(struct calib_options *options, int letter, const char *argument) {
    struct fit_options *fit = &options->fit;
    switch (letter) {
    case 'o':
        options->output = argument;
        return argument[0] != '\0';
    case 'm':
        fit->model = argument;
        return argument[0] != '\0';
    case 'r':
        return read_kinds(argument, fit->kinds);
    case 'p':
        return read_choice(argument, "head", "layer", &fit->per_layer);
    case 't':
        return read_choice(argument, "scores", "proxy", &fit->proxy);
    case 'C':
        fit->centre = false;
        return true;
    case 'P':
        return read_small_count(argument, 0, OSCAR_MAX_PAIRS, &fit->pairs);
    case 'R':
        return read_choice(argument, "nearest", "feedback", &fit->feedback);
    case 'l':
        return read_number(argument, 0, 1e3, '\0', NULL, &fit->lambda);
    case 'c':
        return read_clip(argument, fit);
    case 'L':
        fit->layers = argument;
        return true;
    case 'x':
        return read_count(argument, 1, OSCAR_MAX_SEQUENCE_TOKENS, &fit->context);
    case 's':
        return read_number(argument, 0, 1e3, '\0', NULL, &fit->softmax_scale);
    case 'b':
        return read_number(argument, 1, 1e15, '\0', NULL, &fit->rope.base);
    case 'h' + 256:
        return rope_read_pairing(argument, &fit->rope.pairing);
    case 'd' + 256:
        return read_small_count(argument, 2, 2 * ROPE_MAX_PAIRS, &fit->rope.dims);
    case 'S':
        fit->allow_singular = true;
        return true;
    case 'D':
        fit->date = argument;
        return true;
    case 'f':
        options->calibration = argument;
        return true;
    case 'F':
        options->fit_on = argument;
        return true;
    case 'B':
        return take_baseline(options, argument);
    case 'v':
        options->svg = argument;
        return true;
    case 'j':
        options->json = true;
        return true;
    case 'K':
        options->k_file = argument;
        return true;
    case 'w':
        options->v_file = argument;
        return true;
    case 'k':
        return read_small_count(argument, 1, OSCAR_MAX_KV_HEADS, &options->kv_heads);
    case 'e':
        return read_small_count(argument, 64, 256, &options->hadamard_head_dim);
    default:
        return read_small_count(argument, 1, 256, &fit->threads);
    }
}

static const struct verb *find_verb(const char *name) {
    for (size_t i = 0; i < COUNT(verbs); i++)
        if (strcmp(verbs[i].name, name) == 0)
            return &verbs[i];
    return NULL;
}

/* What the verb cannot do without. */
static int check_needs(const struct verb *verb, struct calib_options *options) {
    if (options->argument_count < verb->least || options->argument_count > verb->most)
        return wrong_usage("%s takes %s", verb->name, verb->most > 0 ? verb->arguments : "no arguments");
    if ((verb->bit & (FIT | HADAMARD | IMPORT)) != 0 && options->output == NULL)
        return wrong_usage("%s needs --output FILE", verb->name);
    if (verb->bit == REPORT && options->calibration == NULL)
        return wrong_usage("report needs --calibration FILE");
    if (verb->bit == HADAMARD &&
        (options->fit.layers == NULL || options->kv_heads == 0 || options->hadamard_head_dim == 0))
        return wrong_usage("hadamard needs --layers, --kv-heads and --head-dim");
    if (verb->bit == IMPORT &&
        (options->k_file != NULL) + (options->v_file != NULL) + 2 * (int)options->argument_count != 2)
        return wrong_usage("import takes a FOLDER that holds both sides, or --k FILE --v FILE");
    if (verb->bit == HADAMARD && !read_small_count(options->fit.layers, 1, OSCAR_MAX_LAYERS, &options->hadamard_layers))
        return wrong_usage("--layers %s: expected a number of layers", options->fit.layers);
    return STATUS_OK;
}

/* -1 where there is something to do, else the exit status. */
static int read_arguments(int argc, char **argv, const struct verb **ret_verb, struct calib_options *options) {
    struct option names[COUNT(parameters) + 1] = {0};
    const struct parameter *given[64];
    size_t given_count = 0;
    for (size_t i = 0; i < COUNT(parameters); i++)
        names[i] = (struct option){.name = parameters[i].name,
                                   .has_arg = parameters[i].argument != NULL ? required_argument : no_argument,
                                   .val = parameters[i].letter};
    for (int letter, index = 0; (letter = getopt_long(argc, argv, "h", names, &index)) != -1;) {
        if (letter == '?')
            return wrong_usage("cannot go on");
        if (letter == 'h') {
            print_help(stdout);
            return STATUS_OK;
        }
        if (letter == 'V') {
            printf("oscar-calib %s\n", OSCAR_VERSION_STRING);
            return STATUS_OK;
        }
        const struct parameter *parameter = &parameters[index];
        if (!take_parameter(options, letter, optarg))
            return wrong_usage("--%s %s: expected %s", parameter->name, optarg, parameter->help);
        if (given_count < COUNT(given))
            given[given_count++] = parameter;
    }
    if (optind == argc) {
        print_help(stderr);
        return STATUS_USAGE;
    }
    const struct verb *verb = find_verb(argv[optind]);
    if (verb == NULL)
        return wrong_usage("no verb %s", argv[optind]);
    for (size_t i = 0; i < given_count; i++)
        if ((given[i]->verbs & verb->bit) == 0)
            return wrong_usage("%s has no --%s", verb->name, given[i]->name);
    options->arguments = (const char *const *)argv + optind + 1;
    options->argument_count = (size_t)(argc - optind - 1);
    *ret_verb = verb;
    int status = check_needs(verb, options);
    return status == STATUS_OK ? -1 : status;
}

int main(int argc, char **argv) {
    struct calib_options options = {.fit = fit_defaults()};
    const struct verb *verb = NULL;
    int status = read_arguments(argc, argv, &verb, &options);
    if (status >= 0)
        return status;
    parallel_quiet_blas();
    struct oscar_cause cause = {0};
    int r = verb->run(&options, &cause);
    if (r == 0 && fflush(stdout) != 0)
        r = oscar_fail(&cause, OSCAR_ERR_IO, "writing the output: %m");
    if (r == 0)
        return STATUS_OK;
    (void)fprintf(stderr, "oscar-calib %s: %s: %s\n", verb->name, oscar_error_text(r), cause.text);
    return STATUS_FAILED;
}
