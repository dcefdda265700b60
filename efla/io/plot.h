// Curves as a picture, drawn by the program gnuplot.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace efla {

struct Curve {
  std::string title;
  std::vector<std::pair<double, double>> points;  ///< not-finite points leave a gap
  std::vector<double> spread = {};  ///< half the height of the band around each point; or empty
  bool dotted = false;              ///< drawn as black dots, over lines that may coincide
};

struct Plot {
  std::string title, x_label, y_label;
  std::vector<Curve> curves;
  bool log_x = false, log_y = false;
  double y_low = 0, y_high = 0;  ///< range of y; equal: from the data
};

/// Writes NAME.gp (script and data in one file, to be edited and drawn again) and draws NAME.png,
/// where `png` is
/// .../NAME.png. Returns whether the picture was drawn; without gnuplot it warns once, the
/// script stays, and so does an older picture. Errors: an unwritable folder.
bool draw_plot(const std::filesystem::path& png, const Plot& plot);

/// The same with several plots beside each other in one picture. Curves at the same place of each
/// plot have one colour, and the legend stands right of the last plot.
bool draw_plots(const std::filesystem::path& png, const std::vector<Plot>& plots);

}  // namespace efla
