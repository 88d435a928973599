"""One file per mixer: its definition, its fast form, its choice of kernel. A yaml in conf/attn registers it."""
