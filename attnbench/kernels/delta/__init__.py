"""The gated delta rule: chunks walked one after the other, or all at once around a scan."""
