//go:build !nonano

package nano

import "embed"

//go:embed model
var files embed.FS
