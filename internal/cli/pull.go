package cli

import (
	"errors"
	"fmt"
	"os"
	"path"
	"sync"
	"time"

	"ninfer/internal/hf/hub"
)

type pullCommand struct {
	Repo     string   `arg:"" help:"Repository: OWNER/NAME."`
	Revision string   `default:"main" placeholder:"R" help:"Branch, tag or commit."`
	Out      string   `placeholder:"DIR" help:"Folder to fill; default: the repository's name."`
	Endpoint string   `placeholder:"URL" help:"Hub to ask; default: HF_ENDPOINT of the environment, else the public one."`
	Include  []string `placeholder:"P" sep:"none" help:"Only files whose path or name matches the pattern; may be repeated."`
	Exclude  []string `placeholder:"P" sep:"none" help:"Not these files; may be repeated."`
	Jobs     int      `default:"8" placeholder:"N" help:"Requests at a time."`
	List     bool     `help:"Print the files with their sizes and fetch nothing."`
	Quiet    bool     `help:"No progress."`
}

func (c *pullCommand) Run(e *environment) error {
	o := hub.Options{
		Endpoint: c.Endpoint, Token: os.Getenv(hub.TokenEnv), Repo: c.Repo, Revision: c.Revision, Out: c.Out,
		Include: c.Include, Exclude: c.Exclude, Jobs: c.Jobs,
	}
	if o.Endpoint == "" {
		o.Endpoint = os.Getenv(hub.EndpointEnv)
	}
	if c.Jobs < 1 || c.Jobs > 256 {
		return usagef("--jobs is %d, need 1 to 256", c.Jobs)
	}
	if !c.Quiet {
		var mu sync.Mutex
		var last time.Time
		o.Waiting = func(failed error, pause time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			if now := time.Now(); now.Sub(last) >= 5*time.Second { // all requests wait at once
				last = now
				e.say("%v; again in %v", failed, pause.Round(100*time.Millisecond))
			}
		}
	}
	if c.List {
		l, err := hub.List(e.ctx, o)
		if err != nil {
			return pullError(err)
		}
		total := int64(0)
		for _, f := range l.Files {
			fmt.Fprintf(e.out, "%15d  %s\n", f.Size, f.Path)
			total += f.Size
		}
		e.say("%s at %s: %d files, %d bytes", l.Repo, l.Commit, len(l.Files), total)
		return nil
	}
	if o.Out == "" {
		o.Out = path.Base(c.Repo)
	}
	if !c.Quiet {
		var last time.Time
		o.Progress = func(p hub.Progress) {
			// A line now and then is bearable in a log file as well.
			if now := time.Now(); p.Done == p.Total || now.Sub(last) >= 5*time.Second {
				last = now
				fmt.Fprintf(e.err, "%.1f of %.1f GB  %.1f MB/s  %v left\n", float64(p.Done)/1e9, float64(p.Total)/1e9, p.Rate()/1e6,
					time.Duration(float64(p.Total-p.Done)/max(p.Rate(), 1)*float64(time.Second)).Round(time.Second))
			}
		}
	}
	s, err := hub.Pull(e.ctx, o)
	if err != nil {
		if e.ctx.Err() != nil {
			e.say("interrupted; the same command goes on where it stopped")
			return statusError(exitInterrupted)
		}
		return pullError(err)
	}
	for _, f := range s.Unhash {
		e.say("%s: the hub gives no digest for it, only its length was checked", f)
	}
	return printJSON(e, s)
}

func pullError(err error) error {
	if u := (*hub.UsageError)(nil); errors.As(err, &u) {
		return usageError{err}
	}
	return err
}
