#include "other_tools.hpp"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <unistd.h>

namespace bench
{

namespace
{

std::string output_of(const std::string &command)
{
    FILE *const pipe = popen(command.c_str(), "re");
    if (pipe == nullptr) throw std::runtime_error("popen(" + command + ")");
    std::string text;
    for (char part[256]; fgets(part, sizeof part, pipe) != nullptr;)
        text += part;
    pclose(pipe);
    return text;
}

bool is_installed(const std::string &program) { return !output_of("command -v " + program).empty(); }

} // namespace

std::optional<Tool> tool_for(const std::string &nic)
{
    const std::string port = std::to_string(20000 + getpid() % 10000);
    if (nic == "ofi:tcp;ofi_rxm" && is_installed("ucx_perftest")) {
        constexpr uint64_t length = 32768, count = 4000, depth = 16;
        const std::string start = "env UCX_TLS=tcp UCX_LOG_LEVEL=error ucx_perftest -p " + port;
        return Tool{.name = "ucx_perftest, put",
                    .length = length,
                    .count = count,
                    .depth = depth,
                    .server = start,
                    .client = start + " 127.0.0.1 -t ucp_put_bw -f -v -s " + std::to_string(length) + " -n " +
                              std::to_string(count) + " -w 400 -O " + std::to_string(depth) + " | cut -d, -f8",
                    .gigabits = static_cast<double>(length) * 8 / 1e9}; // of a message a second
    }
    if (nic.starts_with("verbs:") && is_installed("ib_write_bw")) {
        constexpr uint64_t length = 65536, count = 2000, depth = 16;
        const std::string start = "ib_write_bw -F --report_gbits --output=bandwidth -d " +
                                  nic.substr(nic.find(':') + 1) + " -p " + port + " -s " + std::to_string(length) +
                                  " -n " + std::to_string(count) + " -t " + std::to_string(depth);
        return Tool{.name = "ib_write_bw",
                    .length = length,
                    .count = count,
                    .depth = depth,
                    .server = start,
                    .client = start + " 127.0.0.1",
                    .gigabits = 1};
    }
    return {};
}

// A client that comes too early fails at once, and is started again.
double run(const Tool &tool)
{
    const std::string text = output_of("timeout 120 " + tool.server +
                                       " >/dev/null 2>&1 & for try in 1 2 3 4 5 6 7 8 9 "
                                       "10; do sleep 0.2; out=$(timeout 60 " +
                                       tool.client + " 2>&1) && break; done; printf %s \"$out\" | tail -n 1; wait");
    char *end = nullptr;
    const double number = strtod(text.c_str(), &end);
    if (end == text.c_str() || number <= 0) throw std::runtime_error(tool.name + ": " + text);
    return number * tool.gigabits;
}

} // namespace bench
