from truestep.cli.main import main

main()
