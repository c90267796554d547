"""One engine, iteration by iteration: what each step computes, how long it takes, what the engine then holds. Pure."""
