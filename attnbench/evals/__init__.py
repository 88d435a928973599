"""One file per evaluation. A yaml in conf/eval registers it."""
