"""Generated training text for the bundled models. `specgen tune --train --corpus demo` reads it too."""
