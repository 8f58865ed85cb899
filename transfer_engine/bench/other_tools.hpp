// other_tools.hpp: writes by the tools of others, where they are installed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace bench
{

struct Tool {
    std::string name;
    uint64_t length, count, depth; // of its writes
    std::string server, client;    // commands for a shell; the client prints a number
    double gigabits;               // one of what it prints, in Gb/s
};

// That for this kind of adapter; nothing when there is none or it is not installed.
std::optional<Tool> tool_for(const std::string &nic);
// Gb/s; throws std::runtime_error with what it printed when that is no number.
double run(const Tool &tool);

} // namespace bench
