// What all drawings share: the bars of a timeline, how they are told apart, and how time is cut.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "draw/gantt.h"

namespace echelon {

// Two that ran together lie in one stretch of time: each is drawn as a half of it.
enum class Part : std::uint8_t { whole, first, second };

struct Bar {
  Instruction instruction;
  int chunk = 0;  // which of the rank's stages; in DualPipe which direction
  Part part = Part::whole;
  double begin = 0, end = 0;  // from the first begin of the timeline
};

struct Bars {
  std::vector<std::vector<Bar>> ranks;  // computations, and optimizer steps that take time
  int num_chunks = 1;
  bool has_pairs = false;       // that ran together
  bool has_directions = false;  // a stage is on two ranks
  int largest_microbatch = 0;
  double makespan = 0;
};

Bars bars_of(const Timeline& timeline);

// The largest unit of which every begin and end is a multiple; 0 when there is none worth drawing.
double unit_of(const std::vector<Bars>& tracks);

// Round distance of at least `least` between marks of an axis: 1, 2 or 5 times a power of ten.
double round_step(double least);

struct Colour {
  std::uint8_t red = 0, green = 0, blue = 0;
  bool is_dark() const;  // white letters on it
  std::string hex() const;
  int of_terminal() const;  // of its 256: the nearest of the 6 x 6 x 6 cube
};
// Told apart by readers with any colour vision; later chunks are lighter.
Colour colour_of(Op op, int chunk, int num_chunks);

// What the drawings have of each, in the order of a legend.
std::vector<Op> ops_of(const std::vector<Bars>& tracks);
// "lighter: later chunk", or empty.
std::string describe_shades(const std::vector<Bars>& tracks);
const char* describe(Op op);  // "gradient of the input"

// What is not UTF-8 becomes U+FFFD.
std::string escape_markup(const std::string& text);  // HTML and SVG
std::string escape_json(const std::string& text);

}  // namespace echelon
