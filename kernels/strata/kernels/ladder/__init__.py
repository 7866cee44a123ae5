"""One matrix product, from one thread per element to warp-specialised tensor-core code: the steps of docs/kernel-ladder.md."""
