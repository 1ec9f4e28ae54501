/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest program of somebody else that uses the installed library: pings the daemon, or says why it cannot. */
#include <oscar/oscar.h>
#include <stdio.h>

int main(void) {
    struct oscar_client_options options = OSCAR_INIT(struct oscar_client_options);
    struct oscar_client *client;
    options.timeout_ms = 1000;
    int r = oscar_client_open(&options, &client);
    if (r == 0) {
        r = oscar_client_ping(client);
        oscar_client_close(client);
    }
    if (r < 0) {
        printf("%s: %s: %s\nremedy: %s\n", oscar_error_name(r), oscar_error_text(r), oscar_error_detail(),
               oscar_error_remedy(r));
        return 1;
    }
    printf("liboscar %s: the daemon answers\n", oscar_version());
    return 0;
}
