package quality

import _ "embed"

// Questions are the conversations that a comparison uses when it is given none: a JSON array, each element as run's --messages takes it.
//
//go:embed questions.json
var Questions []byte
