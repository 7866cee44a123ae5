"""One benchmark a kernel, under the kernel's name; `strata bench kernels` runs them."""
