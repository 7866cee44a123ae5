// Generates greedy tokens with an AOTInductor package (strata export RUN --package model.pt2), without Python.
// Takes and prints token ids: ./packaged_model model.pt2 16 1 42 7    (16 tokens after the ids 1 42 7)
// Build with CMakeLists.txt beside it, or: cmake -S examples -B build -DCMAKE_PREFIX_PATH=$(python -c
// "import torch; print(torch.utils.cmake_prefix_path)") && cmake --build build
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <iostream>
#include <regex>
#include <string>
#include <vector>

// Numbers of a JSON list, whatever its nesting: "[[2, 8], [2, 8]]" is 2 8 2 8.
static std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> found;
  const std::regex digits("[0-9]+");
  for (std::sregex_iterator each(text.begin(), text.end(), digits), end; each != end; ++each) found.push_back(std::stoll(each->str()));
  return found;
}

int main(int count, char** words) {
  if (count < 4) {
    std::cerr << "usage: packaged_model FILE.pt2 TOKENS ID...\n";
    return 2;
  }
  torch::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader package(words[1]);
  auto facts = package.get_metadata();
  const torch::Device device(facts["device"] == "cuda" ? torch::kCUDA : torch::kCPU);
  const auto dtype = facts["dtype"] == "float32" ? torch::kFloat : facts["dtype"] == "float16" ? torch::kHalf : torch::kBFloat16;
  const auto whole = torch::dtype(torch::kLong).device(device);

  std::vector<int64_t> fresh;
  for (int word = 3; word < count; ++word) fresh.push_back(std::stoll(words[word]));
  std::vector<torch::Tensor> past;  // key, value of layer 0, key, value of layer 1, ...: [batch, heads, past, width]
  const auto cache = numbers(facts["cache"]);
  for (size_t each = 0; each < cache.size(); each += 2)
    past.push_back(torch::zeros({1, cache[each], 0, cache[each + 1]}, torch::dtype(dtype).device(device)));

  int64_t seen = 0;
  for (int64_t token = 0; token < std::stoll(words[2]); ++token) {
    const int64_t length = fresh.size();
    std::vector<torch::Tensor> inputs = {
        torch::tensor(fresh, torch::kLong).to(device).unsqueeze(0),
        torch::ones({1, seen + length}, whole),
        torch::arange(seen, seen + length, whole).unsqueeze(0),
    };
    inputs.insert(inputs.end(), past.begin(), past.end());
    const auto outputs = package.run(inputs);
    seen += length;
    past.assign(outputs.begin() + 1, outputs.end());
    fresh = {outputs[0].select(0, 0).select(0, length - 1).argmax().item<int64_t>()};
    std::cout << fresh[0] << (token + 1 < std::stoll(words[2]) ? " " : "\n");
  }
}
