package convert

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"os"

	"ninfer/internal/artifact"
)

// UpgradeReport is what Upgrade did: the file OUT.upgrade.json (docs/format.md 1.8.4), members in order; the last four are ours.
type UpgradeReport struct {
	V2SHA256     string                   `json:"v2_sha256"`
	V2Objects    artifact.Map[string]     `json:"-"`          // digest of every object of the input, hex, in order
	V2Text       jsontext.Value           `json:"v2_objects"` // V2Objects
	Banks        artifact.Map[BankReport] `json:"-"`          // of the objects that were encoded anew
	BankText     jsontext.Value           `json:"mtp_banks"`  // Banks
	Timings      UpgradeTimings           `json:"timings"`
	Input        string                   `json:"input"`
	Output       string                   `json:"output"`
	ArtifactID   string                   `json:"artifact_id"`
	Files        []string                 `json:"files"`
	PayloadBytes int64                    `json:"payload_bytes"`
	Seconds      float64                  `json:"seconds"`

	Directory string `json:"directory_sha256"` // of the output's directory
	Published bool   `json:"published_input"`  // the input was the published file, to the byte
	Objects   int    `json:"objects"`
	FileBytes int64  `json:"file_bytes"` // of all files of the output
}

// UpgradeTimings says what the pass waited for, in seconds.
type UpgradeTimings struct {
	ReadWait float64 `json:"read_wait"`
	Write    float64 `json:"write"` // encoding included
	HashWait float64 `json:"hash_wait"`
}

// BankReport is one encoded bank.
type BankReport struct {
	SHA256        string       `json:"sha256"` // of the stored bytes
	Bytes         int64        `json:"bytes"`
	EncodeSeconds float64      `json:"encode_seconds"`
	Oracle        OracleReport `json:"fp64_oracle"`
}

// OracleReport is the check of some experts in binary64.
type OracleReport struct {
	Experts       []int   `json:"experts"`
	Exact         bool    `json:"divisors_and_signs_exact"`
	MaxScaleError float64 `json:"max_scale_error_e4m3_steps"`
	MaxCodeExcess float64 `json:"max_code_excess"`
	Passed        bool    `json:"passed"`
}

// write puts the report into a new file.
func (r *UpgradeReport) write(path string) error {
	var err error
	if r.V2Text, err = orderedObject(&r.V2Objects); err != nil {
		return err
	}
	if r.BankText, err = orderedObject(&r.Banks); err != nil {
		return err
	}
	out, err := json.Marshal(r, jsontext.WithIndent(" "))
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	_, err = f.Write(append(out, '\n'))
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// orderedObject is a JSON object with its members in the map's order.
func orderedObject[V any](m *artifact.Map[V]) (jsontext.Value, error) {
	text := []byte{'{'}
	for name, v := range m.All() {
		if len(text) > 1 {
			text = append(text, ',')
		}
		var err error
		if text, err = jsontext.AppendQuote(text, name); err != nil {
			return nil, err
		}
		b, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		text = append(append(text, ':'), b...)
	}
	return append(text, '}'), nil
}
