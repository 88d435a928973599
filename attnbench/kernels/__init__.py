"""Our own Triton kernels, one operator a file, each with fake, autograd and vmap rules, so that compile and CUDA graphs
see through them. No model code here: a mixer imports the operator it has chosen where it uses it, because Triton is
there on CUDA machines alone."""
