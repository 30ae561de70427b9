pytest_plugins = ["tests.servers", "tests.namespaces"]
