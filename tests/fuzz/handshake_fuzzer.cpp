// handshake_fuzzer: libFuzzer feeds decode() and printable() of common.hpp with bytes, as a peer could.
// What must hold for each message is worked out here a second time, from the bytes alone. That nothing is
// read beyond them, AddressSanitizer sees: libFuzzer's copy is exactly as long as they are.
#include "../../common.hpp"

// Aborts, which libFuzzer reports with the bytes that led here.
static void must_hold(bool condition, const char *what)
{
    if (condition) return;
    fprintf(stderr, "does not hold: %s\n", what);
    abort();
}

// How often each message was decoded: were it never, all that was tried is refusing.
static uint64_t hellos, offers, refusals, closings;

static uint32_t number_at(const uint8_t *bytes)
{
    return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

static void is_for_a_terminal(const std::string &line, const char *what)
{
    must_hold(std::all_of(line.begin(), line.end(), [](char c) { return c >= ' ' && c <= '~'; }), what);
}

template <typename message_type>
static bool decodes_as_it_should(const uint8_t *data, size_t size, uint32_t magic, message_type *message)
{
    memset(static_cast<void *>(message), 0xa5, sizeof *message);
    const message_type before = *message;
    const std::string wrong = decode(data, size, magic, message);
    const bool right = size >= sizeof *message && number_at(data) == magic &&
                       (magic == refusal_magic || number_at(data + 4) == handshake_version);
    must_hold(wrong.empty() == right, "accepted when, and only when, long enough, of this magic and version");
    is_for_a_terminal(wrong, "what is wrong is told in printable characters");
    if (!right) {
        must_hold(memcmp(message, &before, sizeof before) == 0, "refused bytes change no message");
        return false;
    }
    const message_type again = encode(*message);
    must_hold(memcmp(&again, data, sizeof again) == 0, "encoding gives the same bytes again");
    return true;
}

static void prints_as_it_should(const char *bytes, size_t length)
{
    const std::string line = printable(bytes, length);
    const auto *const zero = static_cast<const char *>(length > 0 ? memchr(bytes, 0, length) : nullptr);
    must_hold(line.size() == (zero != nullptr ? static_cast<size_t>(zero - bytes) : length), "ends at the zero");
    is_for_a_terminal(line, "printable characters only");
    for (size_t i = 0; i < line.size(); ++i)
        must_hold(line[i] == bytes[i] || line[i] == '?', "what is printable stays");
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    hello greeting;
    offer cache;
    refusal no;
    closing end;
    if (decodes_as_it_should(data, size, hello_magic, &greeting)) ++hellos;
    if (decodes_as_it_should(data, size, offer_magic, &cache)) {
        ++offers;
        must_hold(cache.rkey == number_at(data + 40), "the key is big-endian, at byte 40");
    }
    if (decodes_as_it_should(data, size, closing_magic, &end)) {
        ++closings;
        must_hold(end.verdict == number_at(data + 32), "the verdict is big-endian, at byte 32");
    }
    if (decodes_as_it_should(data, size, refusal_magic, &no)) {
        ++refusals;
        prints_as_it_should(no.reason, sizeof no.reason);
    }
    prints_as_it_should(reinterpret_cast<const char *>(data), size);
    return 0;
}

extern "C" int LLVMFuzzerInitialize(int *, char ***)
{
    hello unused{};
    must_hold(!decode(nullptr, 0, hello_magic, &unused).empty(), "no bytes at all are refused");
    atexit([] { printf("decoded %zu %zu %zu %zu\n", hellos, offers, refusals, closings); });
    return 0;
}
