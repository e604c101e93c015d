"""How the bundled models were trained: `python -m specgen.demo.recipe`. No other package of specgen may import this one."""
