"""Settings: fields, rules, errors, and the classes that may be built; without torch and Hydra."""
