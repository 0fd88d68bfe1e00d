int kvtile_probe_unused;
