/* SPDX-License-Identifier: Apache-2.0 */
/* Connecting: versions, what a daemon may send wrong, and what is left behind when it does: nothing. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/version.h"
#include "tests/support/descriptors.h"
#include "tests/unit/client_fixture.h"

static int open_with(const char *socket_path, struct oscar_client **ret) {
    struct oscar_client_options options = OSCAR_INIT(struct oscar_client_options);
    options.socket = socket_path;
    options.timeout_ms = SHORT_MS;
    return oscar_client_open(&options, ret);
}

static void without_a_daemon_the_error_says_where_it_was_looked_for(void **state) {
    (void)state;
    struct oscar_client *client = NULL;
    assert_code(OSCAR_ERR_NOT_RUNNING, open_with("/tmp/no-such-directory/worker.sock", &client));
    assert_non_null(strstr(oscar_error_detail(), "/tmp/no-such-directory/worker.sock"));
    assert_null(client);
    assert_non_null(strstr(oscar_error_remedy(OSCAR_ERR_NOT_RUNNING), "start oscard"));
}

static void the_socket_is_found_by_environment(void **state) {
    struct client_world *world = *state;
    struct oscar_client_options options = OSCAR_INIT(struct oscar_client_options);
    setenv("OSCAR_SOCKET", fake_oscard_socket(world->fake), 1);
    int r = oscar_client_open(&options, &world->client);
    unsetenv("OSCAR_SOCKET");
    assert_ok(r);
    setenv("OSCAR_SOCKET", "/tmp/no-such-directory/other.sock", 1);
    struct oscar_client *other;
    r = oscar_client_open(NULL, &other);
    unsetenv("OSCAR_SOCKET");
    assert_code(OSCAR_ERR_NOT_RUNNING, r);
}

static void a_path_that_is_too_long_is_refused(void **state) {
    (void)state;
    char path[200];
    memset(path, 'a', sizeof(path));
    path[sizeof(path) - 1] = '\0';
    struct oscar_client *client;
    assert_code(OSCAR_ERR_INVALID, open_with(path, &client));
}

static void a_daemon_that_accepts_nobody_costs_the_timeout(void **state) {
    (void)state;
    char directory[] = "/tmp/oscar-client-XXXXXX";
    assert_non_null(mkdtemp(directory));
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/worker.sock", directory);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(listener, 0), 0);
    struct oscar_client *client;
    double start = now_ms();
    for (unsigned i = 0; i < 3; i++) /* the first of them fill the backlog and wait for an answer to HELLO */
        assert_code(OSCAR_ERR_TIMEOUT, open_with(address.sun_path, &client));
    assert_true(now_ms() - start < MARGIN_MS);
    close(listener);
    unlink(address.sun_path);
    rmdir(directory);
}

static void info_tells_what_was_agreed_on(void **state) {
    struct client_world *world = *state;
    struct oscar_client_info info = OSCAR_INIT(struct oscar_client_info);
    assert_ok(oscar_client_info(world->client, &info));
    assert_int_equal(info.incarnation, 42);
    assert_int_equal(info.protocol_major, OSCAR_PROTOCOL_MAJOR);
    assert_int_equal(info.protocol_minor, OSCAR_PROTOCOL_MINOR);
    assert_string_equal(info.backend, "host");
    assert_string_equal(info.daemon_version, "fake");
    struct oscar_request hello = fake_oscard_last(world->fake, OSCAR_HELLO);
    assert_string_equal(hello.hello.client_name, "test");
    assert_ok(oscar_client_ping(world->client));
}

static void an_older_struct_is_filled_as_far_as_it_goes(void **state) {
    struct client_world *world = *state;
    struct oscar_client_info info;
    memset(&info, 0x77, sizeof(info));
    info.size = offsetof(struct oscar_client_info, protocol_major);
    assert_ok(oscar_client_info(world->client, &info));
    assert_int_equal(info.size, offsetof(struct oscar_client_info, protocol_major));
    assert_int_equal(info.incarnation, 42);
    assert_int_equal(info.protocol_major, 0x77777777);
    info.size = 0;
    assert_code(OSCAR_ERR_INVALID, oscar_client_info(world->client, &info));
}

static void options_of_a_newer_library_are_accepted_while_unused(void **state) {
    struct client_world *world = *state;
    struct {
        struct oscar_client_options known;
        uint64_t later;
    } options = {.known = {.size = sizeof(options), .socket = fake_oscard_socket(world->fake)}};
    assert_ok(oscar_client_open(&options.known, &world->client));
    oscar_client_close(world->client);
    world->client = NULL;
    options.later = 1;
    assert_code(OSCAR_ERR_UNSUPPORTED, oscar_client_open(&options.known, &world->client));
    options.known.size = 4;
    assert_code(OSCAR_ERR_INVALID, oscar_client_open(&options.known, &world->client));
}

static bool next_minor(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->hello.minor = OSCAR_PROTOCOL_MINOR + 1;
    return true;
}

static void a_daemon_of_a_newer_minor_version_is_spoken_to_in_ours(void **state) {
    struct client_world *world = *state;
    fake_oscard_change(world->fake, OSCAR_HELLO, next_minor);
    assert_ok(open_client(world->fake, &world->client));
    struct oscar_client_info info = OSCAR_INIT(struct oscar_client_info);
    assert_ok(oscar_client_info(world->client, &info));
    assert_int_equal(info.protocol_minor, OSCAR_PROTOCOL_MINOR);
}

static bool next_major(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->hello.major = OSCAR_PROTOCOL_MAJOR + 1;
    return true;
}

static void another_major_version_is_refused_in_words(void **state) {
    struct client_world *world = *state;
    fake_oscard_change(world->fake, OSCAR_HELLO, next_major);
    assert_code(OSCAR_ERR_VERSION, open_client(world->fake, &world->client));
    assert_non_null(strstr(oscar_error_detail(), "protocol 2"));
    assert_non_null(strstr(oscar_error_detail(), "speaks 1"));
    fake_oscard_change(world->fake, OSCAR_HELLO, NULL);
    fake_oscard_fail(world->fake, OSCAR_HELLO, OSCAR_ERR_VERSION, "the client speaks protocol 1.0, this daemon 2.0");
    assert_code(OSCAR_ERR_VERSION, open_client(world->fake, &world->client));
    assert_non_null(strstr(oscar_error_detail(), "this daemon 2.0"));
}

static bool small_window(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->hello.window_bytes = 4096;
    return true;
}

static bool another_verb(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->verb = OSCAR_PING;
    return true;
}

static bool wrong_magic(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)request;
    (void)reply;
    fake_oscard_window(fake)->magic = 1;
    return true;
}

static bool unknown_backend(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    strcpy(reply->hello.backend, "abacus");
    return true;
}

static void a_wrong_hello_reply_is_refused_and_leaves_no_descriptor(void **state) {
    struct client_world *world = *state;
    static const struct {
        fake_change *change;
        int error;
    } cases[] = {{small_window, OSCAR_ERR_PROTOCOL},
                 {another_verb, OSCAR_ERR_PROTOCOL},
                 {next_major, OSCAR_ERR_VERSION},
                 {unknown_backend, OSCAR_ERR_UNSUPPORTED},
                 {wrong_magic, OSCAR_ERR_PROTOCOL}};
    fake_oscard_fail(world->fake, OSCAR_HELLO, OSCAR_ERR_LIMIT, "full");
    assert_code(OSCAR_ERR_LIMIT, open_client(world->fake, &world->client));
    fake_oscard_fail(world->fake, OSCAR_HELLO, 0, "");
    fake_oscard_settle(world->fake);
    unsigned before = open_descriptors();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fake_oscard_change(world->fake, OSCAR_HELLO, cases[i].change);
        assert_code(cases[i].error, open_client(world->fake, &world->client));
        assert_null(world->client);
        fake_oscard_settle(world->fake);
        assert_int_equal(open_descriptors(), before);
    }
}

static void a_daemon_that_dies_in_the_handshake_is_a_lost_connection(void **state) {
    struct client_world *world = *state;
    fake_oscard_die_at(world->fake, OSCAR_HELLO);
    assert_code(OSCAR_ERR_DISCONNECTED, open_client(world->fake, &world->client));
}

static void closing_leaves_no_descriptor(void **state) {
    struct client_world *world = *state;
    unsigned before = open_descriptors();
    for (unsigned i = 0; i < 3; i++) {
        assert_ok(open_client(world->fake, &world->client));
        oscar_client_close(world->client);
        world->client = NULL;
        fake_oscard_settle(world->fake);
    }
    assert_int_equal(open_descriptors(), before);
}

static void an_open_client_has_room_for_the_descriptors_of_a_record(void **state) {
    struct client_world *world = *state;
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    static int taken[8192];
    unsigned count = 0, places = descriptor_table_places(getpid());
    assert_true(places > 0);
    do { /* until the table has no room for those of a record, but some for what opening takes */
        assert_true(count < sizeof(taken) / sizeof(taken[0]));
        taken[count] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        assert_true(taken[count] >= 0);
    } while (taken[count++] + OSCAR_MAX_RECORD_FDS / 2 < places);
    assert_ok(open_client(world->fake, &world->client));
    assert_true(descriptor_table_places(getpid()) >= (unsigned)taken[count - 1] + OSCAR_MAX_RECORD_FDS);
    while (count > 0)
        close(taken[--count]);
}

static void a_forked_child_is_refused(void **state) {
    struct client_world *world = *state;
    pid_t child = fork();
    if (child == 0) {
        bool refused = oscar_client_ping(world->client) == OSCAR_ERR_STATE;
        oscar_client_close(world->client);
        _exit(refused ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_ok(oscar_client_ping(world->client)); /* the parent's connection is as it was */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_a_daemon_the_error_says_where_it_was_looked_for),
        cmocka_unit_test(a_path_that_is_too_long_is_refused),
        cmocka_unit_test(a_daemon_that_accepts_nobody_costs_the_timeout),
        cmocka_unit_test_setup_teardown(the_socket_is_found_by_environment, fake_setup, world_teardown),
        cmocka_unit_test_setup_teardown(info_tells_what_was_agreed_on, client_setup, world_teardown),
        cmocka_unit_test_setup_teardown(an_older_struct_is_filled_as_far_as_it_goes, client_setup, world_teardown),
        cmocka_unit_test_setup_teardown(options_of_a_newer_library_are_accepted_while_unused, fake_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(a_daemon_of_a_newer_minor_version_is_spoken_to_in_ours, fake_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(another_major_version_is_refused_in_words, fake_setup, world_teardown),
        cmocka_unit_test_setup_teardown(a_wrong_hello_reply_is_refused_and_leaves_no_descriptor, fake_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(a_daemon_that_dies_in_the_handshake_is_a_lost_connection, fake_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(closing_leaves_no_descriptor, fake_setup, world_teardown),
        cmocka_unit_test_setup_teardown(an_open_client_has_room_for_the_descriptors_of_a_record, fake_setup,
                                        world_teardown),
        cmocka_unit_test_setup_teardown(a_forked_child_is_refused, client_setup, world_teardown),
    };
    return cmocka_run_group_tests_name("client_handshake", tests, NULL, NULL);
}
