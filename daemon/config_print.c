/* SPDX-License-Identifier: Apache-2.0 */
/* --help, --print-config and --check-config, all from the table. */
#include <string.h>

#include "daemon/config_table.h"

static void print_indented(FILE *out, const char *text, const char *indent) {
    while (*text != '\0') {
        size_t length = strcspn(text, "\n");
        fprintf(out, "%s%.*s\n", indent, (int)length, text);
        text += length + (text[length] == '\n');
    }
}

void config_print_help(FILE *out) {
    fputs(
        "Usage: oscard [--config FILE] [--KEY VALUE ...]\n"
        "\n"
        "The daemon that owns a host's KV cache and shares it between inference workers.\n"
        "\n"
        "Options:\n"
        "  --config FILE    configuration file (default: $OSCARD_CONFIG, else " CONFIG_DEFAULT_FILE " if it exists)\n"
        "  --check-config   print the configuration in effect and where each value comes from, then exit with 0 or 78\n"
        "  --print-config   print a configuration file with every key, its meaning and its default, then exit\n"
        "  --version        print the version of the program and of the protocol, then exit\n"
        "  --help           print this text, then exit\n"
        "\n"
        "Keys. Each can stand in the file, in the environment or on the command line; the later wins.\n",
        out);
    for (size_t s = 0; s < config_sections_count; s++) {
        fprintf(out, "\n[%s]\n", config_sections[s].name);
        print_indented(out, config_sections[s].help, "  ");
        for (size_t i = 0; i < config_keys_count; i++) {
            const struct config_key *key = &config_keys[i];
            if (strcmp(key->section, config_sections[s].name) != 0)
                continue;
            char flag[64], environment[64];
            config_flag_name(key, flag);
            config_environment_name(key, environment);
            fprintf(out, "\n  %s    %s%s%s%s\n", key->name, key->alias != NULL ? "--" : "",
                    key->alias != NULL ? key->alias : "", key->alias != NULL ? ", " : "", flag);
            fprintf(out, "      environment %s, default: %s\n", environment,
                    key->fallback_shown != NULL ? key->fallback_shown : key->fallback);
            print_indented(out, key->help, "      ");
        }
    }
    fputs("\n"
          "Signals:\n"
          "  SIGTERM, SIGINT  stop accepting, close all connections, exit with 0\n"
          "  SIGHUP           open log_file anew\n"
          "\n"
          "Exit status:\n"
          "  0   stopped as asked\n"
          "  64  wrong command line\n"
          "  69  no device of the wanted backend, or one that fails its test\n"
          "  70  internal error\n"
          "  71  the device failed while it served, or did not return from a call (watchdog_seconds)\n"
          "  73  the sockets could not be made\n"
          "  75  another daemon serves this socket or directory\n"
          "  78  the configuration was not accepted\n",
          out);
}

void config_print_sample(FILE *out) {
    fputs("# Configuration of oscard. Every key is shown at its default; remove the # in front of it to change it.\n"
          "# `oscard --check-config` checks a file; the environment (OSCARD_SECTION_KEY) and flags (--section-key) win "
          "over it.\n",
          out);
    for (size_t s = 0; s < config_sections_count; s++) {
        fprintf(out, "\n[%s]\n", config_sections[s].name);
        print_indented(out, config_sections[s].help, "# ");
        for (size_t i = 0; i < config_keys_count; i++) {
            const struct config_key *key = &config_keys[i];
            if (strcmp(key->section, config_sections[s].name) != 0)
                continue;
            fputs("\n", out);
            print_indented(out, key->help, "# ");
            if (key->choices != NULL) {
                fputs("# One of:", out);
                for (size_t c = 0; key->choices[c] != NULL; c++)
                    fprintf(out, "%s %s", c > 0 ? "," : "", key->choices[c]);
                fputs(".\n", out);
            }
            if (key->fallback_shown != NULL)
                fprintf(out, "# Default: %s.\n", key->fallback_shown);
            fprintf(out, "#%s =%s%s\n", key->name, key->fallback[0] != '\0' ? " " : "", key->fallback);
        }
    }
}

void config_print_effective(const struct config *config, FILE *out) {
    for (size_t s = 0; s < config_sections_count; s++) {
        fprintf(out, "%s[%s]\n", s > 0 ? "\n" : "", config_sections[s].name);
        for (size_t i = 0; i < config_keys_count; i++) {
            const struct config_key *key = &config_keys[i];
            if (strcmp(key->section, config_sections[s].name) != 0)
                continue;
            char value[4200];
            config_format_value(config, key, value, sizeof(value));
            const char *origin = config->state->origin[i];
            fprintf(out, "# %s\n%s = %s\n", origin != NULL ? origin : "default", key->name, value);
        }
        if (strcmp(config_sections[s].name, "tenants") != 0)
            continue;
        for (size_t i = 0; i < config->tenants; i++) {
            bool first = i == 0 || strcmp(config->tenant[i - 1].name, config->tenant[i].name) != 0;
            bool last = i + 1 == config->tenants || strcmp(config->tenant[i + 1].name, config->tenant[i].name) != 0;
            if (first)
                fprintf(out, "tenant.%s = ", config->tenant[i].name);
            fprintf(out, "%u%s", config->tenant[i].uid, last ? "\n" : ",");
        }
    }
}
